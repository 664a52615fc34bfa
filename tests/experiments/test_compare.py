"""Comparisons: every run once, tested on the same tokens; and what the whole is for, end to end."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainshort.cli.main import main
from trainshort.cli.shown import comparison_tables
from trainshort.data import PrepareConfig, TokenData
from trainshort.data.prepare import prepare
from trainshort.evaluation.evaluate import evaluate
from trainshort.experiments import compare as compare_module
from trainshort.experiments.compare import Watcher, compare
from trainshort.experiments.config import CompareConfig
from trainshort.experiments.watching import QUIET
from trainshort.report.build import build_report


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(20)]
    (folder / "words.txt").write_text(" ".join(draw.choice(words) for _ in range(5000)))
    sources = (str(folder / "words.txt"),)
    return prepare(PrepareConfig(sources=sources, out=str(folder / "data"), workers=1), progress=False)


def small(data: Path, out: Path, **changes: Any) -> CompareConfig:
    fields: dict[str, Any] = {
        "data": str(data),
        "out": str(out),
        "positions": ("alibi", "learned"),
        "length": (16,),
        "multiples": (1, 2, 4),
        "steps": 3,
        "batch_tokens": 64,
        "num_layers": 1,
        "d_model": 16,
        "num_heads": 2,
        "test_tokens": 300,
        "device": "cpu",
    }
    return CompareConfig(**{**fields, **changes})


def test_every_run_has_its_folder_and_its_records(data: Path, tmp_path: Path) -> None:
    result = compare(small(data, tmp_path, seeds=(0, 1), length=(16, 32)))
    assert json.loads((tmp_path / "comparison.json").read_text()) == result
    assert [run["folder"] for run in result["runs"]] == [
        f"{position}-{length}-seed{seed}"
        for seed in (0, 1)
        for length in (16, 32)
        for position in ("alibi", "learned")
    ]
    for run in result["runs"]:
        stored = json.loads((tmp_path / run["folder"] / "evaluation.json").read_text())["records"]
        assert run["records"] == stored
        assert (tmp_path / run["folder"] / "metrics.jsonl").exists()
        assert [record["length"] for record in run["records"]] == [run["length"] * each for each in (1, 2, 4)]
        assert [("skipped" in record) for record in run["records"]] == [
            run["position"] == "learned" and each > 1 for each in (1, 2, 4)
        ]
    spans = {
        (record["first_token"], record["end_token"])
        for run in result["runs"]
        if run["length"] == 16
        for record in run["records"]
    }
    assert spans == {(1, 257)}


def test_methods_with_options_stand_beside_those_without(data: Path, tmp_path: Path) -> None:
    """In the table, in the report and in a comparison that is extended; options that are none are refused first."""
    compare(small(data, tmp_path, positions=("alibi",)), QUIET)
    result = compare(small(data, tmp_path, positions=("alibi", "alibi:biased_heads=1")), QUIET)
    plain, flat = result["runs"]
    assert (plain["position"], flat["position"]) == ("alibi", "alibi-biased_heads=1")
    assert flat["config"]["position_options"] == {"biased_heads": 1}
    (table,) = comparison_tables(result)
    assert list(table.columns[0].cells) == ["alibi", "alibi-biased_heads=1"]
    report = build_report([tmp_path], tmp_path / "report", figures=False)
    assert "alibi-biased_heads=1 " in (report.finding or "")
    with pytest.raises(ValueError, match="no option 'biased_head'"):
        compare(small(data, tmp_path, positions=("alibi:biased_head=1",)), QUIET)


@pytest.mark.slow
def test_all_training_lengths_are_tested_on_the_same_tokens(data: Path, tmp_path: Path) -> None:
    """Though whole windows of the longest length of each would be 896 and 864 tokens."""
    config = small(
        data, tmp_path, positions=("alibi",), length=(16, 24), multiples=(1, 2), test_tokens=900, batch_tokens=48
    )
    result = compare(config)
    spans = {(each["first_token"], each["end_token"]) for run in result["runs"] for each in run["records"]}
    assert spans == {(1, 865)}
    config = replace(config, out=str(tmp_path / "few"), test_tokens=90)  # not enough for both
    spans = {(each["first_token"], each["end_token"]) for run in compare(config)["runs"] for each in run["records"]}
    assert spans == {(1, 65), (1, 49)}


def test_every_model_continues_a_text(data: Path, tmp_path: Path) -> None:
    compare(small(data, tmp_path / "out"))
    begin = TokenData(data).tokenizer.decode([int(token) for token in TokenData(data).validation[:48]])
    for name, most in (("alibi-16-seed0", 240), ("learned-16-seed0", 16)):
        path = tmp_path / "out" / name / "samples.json"
        (sample,) = json.loads(path.read_text())["samples"]
        assert begin.startswith(sample["prompt"])
        assert sample["prompt"]
        assert 0 < len(sample["text"].encode()) <= 4 * most
        inside = sample["within_trained_length"]  # the prompt of learned positions is half of their 16
        assert inside == (0 if name.startswith("alibi") else len(sample["text"]))
    before = path.stat().st_mtime_ns
    compare(small(data, tmp_path / "out"))
    assert path.stat().st_mtime_ns == before, "the same weights have nothing new to say"


def test_what_is_done_is_not_done_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(data, tmp_path)
    first = compare(config)
    calls: list[str] = []
    monkeypatch.setattr(compare_module, "train", lambda training, **_: calls.append(training.position))
    monkeypatch.setattr(compare_module, "evaluate", lambda *_, **__: calls.append("evaluate"))
    assert compare(config) == first
    assert calls == []


def test_a_longer_list_of_methods_and_lengths_adds_what_is_new(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(small(data, tmp_path, positions=("alibi",), test_tokens=256))
    trained: list[str] = []
    train = compare_module.train
    monkeypatch.setattr(
        compare_module, "train", lambda config, **more: (trained.append(config.position), train(config, **more))
    )
    said: list[str] = []
    config = small(data, tmp_path, positions=("alibi", "none"), multiples=(1, 2, 4, 8), test_tokens=256)
    compare(config, Watcher(say=said.append))
    assert trained == ["none"]
    assert "run 1 of 2, alibi at 16, seed 0: testing at 128" in said
    assert any(text.startswith("run 2 of 2, none at 16, seed 0: trained in") for text in said)


def test_a_test_on_other_data_does_not_count(data: Path, tmp_path: Path) -> None:
    config = small(data, tmp_path / "out", positions=("alibi",))
    first = compare(config)["runs"][0]["records"]
    text = tmp_path / "other.txt"
    text.write_text("something else " * 1000)
    other = prepare(PrepareConfig(sources=(str(text),), out=str(tmp_path / "other"), workers=1), progress=False)
    evaluate(tmp_path / "out" / "alibi-16-seed0", TokenData(other), config.evaluation(16))
    again = compare(config)["runs"][0]["records"]
    assert [record["nll_sum"] for record in again] == [record["nll_sum"] for record in first]


def other_data(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "other.txt").write_text("something else " * 1000)
    sources = (str(folder / "other.txt"),)
    return prepare(PrepareConfig(sources=sources, out=str(folder / "other"), workers=1), progress=False)


@pytest.mark.slow
def test_an_evaluation_on_other_data_leaves_the_table_as_it_was(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Printed and in the report, where the other data has a table of its own."""
    monkeypatch.setattr("trainshort.report.figures.drawn", lambda chart, dots: iter(()))  # they take seconds
    out, other = tmp_path / "out", other_data(tmp_path)
    words = (
        f"compare --data {data} --out {out} --positions alibi none --seeds 0 1 --length 16 --steps 2 --multiples 1 2"
    )
    words += " --batch-tokens 64 --num-layers 1 --d-model 16 --num-heads 2 --test-tokens 64 --device cpu"
    assert main(words.split()) == 0
    before = (out / "report" / "tables" / "extrapolation.csv").read_text()
    shown = capsys.readouterr().out
    test = ["evaluate", str(out / "alibi-16-seed1"), "--lengths", "16", "32", "--tokens", "64"]
    assert main([*test, "--data", str(other)]) == 0
    assert main([*test, "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    assert main(words.split()) == 0
    assert capsys.readouterr().out == shown
    tables = out / "report" / "tables"
    assert (tables / "extrapolation.csv").read_text() == before
    texts = [(tables / f"extrapolation_{number}.csv").read_text() for number in (2, 3)]
    others = [list(csv.DictReader(text.splitlines())) for text in texts]
    assert {(row["position"], row["seeds"]) for rows in others for row in rows} == {("alibi", "1")}
    identities = {(row["data"], row["dtype"]) for rows in others for row in rows}
    assert identities == {(TokenData(other).identity, "float32"), (TokenData(data).identity, "bfloat16")}
    assert str(other) in (out / "report" / "report.html").read_text()


@pytest.mark.slow
def test_a_part_of_a_comparison_extends_it(data: Path, tmp_path: Path) -> None:
    first = compare(small(data, tmp_path, positions=("alibi", "none"), seeds=(0, 1)))
    part = compare(small(data, tmp_path, positions=("none", "t5")))
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert stored == part
    assert part["runs"][: len(first["runs"])] == first["runs"]
    assert [run["folder"] for run in part["runs"][4:]] == ["t5-16-seed0"]


def test_another_test_is_added_to_the_records(data: Path, tmp_path: Path) -> None:
    first = compare(small(data, tmp_path, positions=("alibi", "none")))
    again = compare(small(data, tmp_path, positions=("alibi",), mode="sliding", multiples=(2,)))
    alibi, none = again["runs"]
    assert none == first["runs"][1]
    assert alibi["records"][:3] == first["runs"][0]["records"]
    assert [(record["mode"], record["length"]) for record in alibi["records"][3:]] == [("sliding", 32)]
    assert [(test["mode"], test["lengths"]) for test in again["tests"]] == [("sliding", [32])]


def test_a_comparison_of_the_first_format_is_extended(data: Path, tmp_path: Path) -> None:
    compare(small(data, tmp_path, positions=("alibi",)))
    path = tmp_path / "comparison.json"
    old = json.loads(path.read_text())
    del old["tests"]
    for run in old["runs"]:
        del run["config"]
        run["records"] = [{key: each[key] for key in each if key != "model"} for each in run["records"]]
    path.write_text(json.dumps(old))
    assert [run["position"] for run in compare(small(data, tmp_path, positions=("none",)))["runs"]] == [
        "alibi",
        "none",
    ]


def test_runs_that_cannot_be_compared_are_not_put_into_one_file(data: Path, tmp_path: Path) -> None:
    compare(small(data, tmp_path, positions=("alibi",)))
    before = (tmp_path / "comparison.json").read_bytes()
    with pytest.raises(ValueError, match=r"can't be compared with none-16-seed0 \(steps was 3, is 4 now"):
        compare(small(data, tmp_path, positions=("none",), steps=4))
    other = other_data(tmp_path / "beside")
    with pytest.raises(ValueError, match="holds runs on other data"):
        compare(small(other, tmp_path, positions=("none",)))
    assert (tmp_path / "comparison.json").read_bytes() == before
    assert not (tmp_path / "none-16-seed0").exists()


def test_what_is_no_comparison_is_refused(data: Path, tmp_path: Path) -> None:
    for content in ("{", "[]", "{}", '{"format": "trainshort comparison", "version": 1, "runs": 3, "data": 4}'):
        (tmp_path / "comparison.json").write_text(content)
        with pytest.raises(ValueError, match=r"comparison.json: .*move it away"):
            compare(small(data, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["comparison.json"]


def test_an_interrupted_run_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(data, tmp_path / "one", positions=("alibi",), steps=6)
    whole = compare(replace(config, out=str(tmp_path / "two")))
    train = compare_module.train
    counted: list[int] = []

    def stop() -> bool:
        counted.append(1)
        return len(counted) == 3

    monkeypatch.setattr(compare_module, "train", lambda training, **more: train(training, stop=stop, **more))
    with pytest.raises(KeyboardInterrupt, match="step 3 of 6"):
        compare(config)
    monkeypatch.undo()
    resumed = compare(config)
    assert [each["nll_sum"] for each in resumed["runs"][0]["records"]] == [
        each["nll_sum"] for each in whole["runs"][0]["records"]
    ]


def test_another_run_in_the_folder_is_not_touched(data: Path, tmp_path: Path) -> None:
    compare(small(data, tmp_path))
    before = (tmp_path / "alibi-16-seed0" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"holds another run \(lr was 0.001, is 0.1 now\)"):
        compare(small(data, tmp_path, lr=0.1))
    assert (tmp_path / "alibi-16-seed0" / "model.safetensors").read_bytes() == before


def test_runs_on_other_data_are_refused(data: Path, tmp_path: Path) -> None:
    compare(small(data, tmp_path / "out"))
    text = tmp_path / "other.txt"
    text.write_text("something else " * 1000)
    other = prepare(PrepareConfig(sources=(str(text),), out=str(tmp_path / "other"), workers=1), progress=False)
    with pytest.raises(ValueError, match="it was trained on other data"):
        compare(small(other, tmp_path / "out"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": ("alibi", "rotery")}, "did you mean 'rotary'"),
        ({"multiples": (1, 5000)}, "too few for windows of 80,000 tokens"),
    ],
)
def test_mistakes_show_before_anything_is_trained(
    data: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare(small(data, tmp_path / "out", test_tokens=None, **changes))
    assert not (tmp_path / "out").exists()


def test_the_command_prints_the_table(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = f"compare --recipe demo --data {data} --out {out} --positions alibi learned --length 16 --steps 2"
    words += " --multiples 1 2 4 8 16"
    more = "--batch-tokens 64 --num-layers 1 --d-model 16 --num-heads 2 --test-tokens 512 --seeds 0 1 --jobs 1"
    assert main([*words.split(), *more.split()]) == 0
    shown = capsys.readouterr().out
    for expected in ("trained at 16, tested at", "256", "alibi", "learned positions end at 16", "means of 2 seeds"):
        assert expected in shown
    finding, page = shown.splitlines()[-2:]
    assert finding.startswith("Trained at 16 tokens and tested at 256 (16 times as long), ALiBi has perplexity ")
    assert "Learned has none there" in finding
    assert page == f"the report is {out / 'report' / 'report.html'}"
    config = json.loads((out / "comparison.json").read_text())["config"]
    assert config["lr"] == 0.003  # the recipe's
    assert config["positions"] == ["alibi", "learned"]


@pytest.mark.slow
def test_alibi_goes_on_where_sinusoidal_does_not(tmp_path: Path) -> None:
    config = CompareConfig(
        out=str(tmp_path),
        positions=("alibi", "sinusoidal"),
        length=(32,),
        multiples=(1, 2, 4, 8),
        steps=300,
        batch_tokens=1024,
        lr=4e-3,
        num_layers=2,
        d_model=64,
        num_heads=4,
        test_tokens=8192,
        checkpoint_every=0,
        device="cpu",
    )
    found = {run["position"]: [record["perplexity"] for record in run["records"]] for run in compare(config)["runs"]}
    assert found["alibi"][0] < 12  # it has learned something: a uniform guess would have 257
    assert found["alibi"][-1] <= 1.03 * found["alibi"][0]
    assert found["sinusoidal"][-1] > 1.2 * found["sinusoidal"][0]
