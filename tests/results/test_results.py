"""The paper's experiments: what is run, in which order and within which time; and a page that says what files say."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.training.small import small_data
from trainshort.cli.arguments import Parser, add_fields, read
from trainshort.cli.main import _module

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("plan", "run", "found", "claims", "drawing", "page")


class Modules(NamedTuple):
    plan: Any
    run: Any
    found: Any
    claims: Any
    drawing: Any
    page: Any


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    monkeypatch.syspath_prepend(ROOT / "results")
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield Modules(*(__import__(name) for name in NAMES))
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def places(modules: Modules, tmp_path: Path) -> Any:
    (tmp_path / "texts").mkdir()
    for name in ("wikitext-103-valid", "a-book", "b-book"):
        (tmp_path / "texts" / f"{name}.txt").write_text("text")
    return modules.plan.Places("data", str(tmp_path / "texts"), "scratch")


def try_all(modules: Modules, results: Path, size: Any, losses: dict[str, float | None]) -> None:
    """Tries of every method: a loss by rate, None for one that diverged."""
    for contender in modules.plan.CONTENDERS:
        for rate, name in modules.plan.tried(contender, size).items():
            (results / name).mkdir(parents=True)
            row = {"step": 1, "loss": 2.0} if losses[rate] is None else {"step": 1, "validation_loss": losses[rate]}
            (results / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
            (results / name / "made.json").write_text(json.dumps({"kind": "try", "seconds": 3.0}))


@pytest.mark.parametrize("size", ["full", "rehearsal"])
def test_every_command_of_the_plan_is_one(modules: Modules, places: Any, tmp_path: Path, size: str) -> None:
    """Its flags are known and its values allowed."""
    chosen = modules.plan.SIZES[size]
    try_all(modules, tmp_path, chosen, dict.fromkeys(chosen.rates, 3.0))
    commands = [
        command
        for part in modules.plan.PARTS
        for unit in modules.plan.units(part, chosen, places)
        for command in unit.commands(tmp_path)
    ]
    assert {command[0] for command in commands} == {"train", "evaluate", "inspect"}
    for name, *words in {tuple(command) for command in commands}:
        flags = read(_parser(name), _module(name).Flags, list(words))
        if name == "train":
            flags.config()


def _parser(name: str) -> Parser:
    parser = Parser(f"trainshort {name}", "")
    add_fields(parser, _module(name).Flags)
    return parser


def test_all_that_is_asked_for_is_planned(modules: Modules, places: Any, tmp_path: Path) -> None:
    size = modules.plan.SIZES["full"]
    found = {part: modules.plan.units(part, size, places) for part in modules.plan.PARTS}
    names = [name for units in found.values() for unit in units for name in unit.folders]
    assert len(set(names)) == len(names)
    for contender in modules.plan.CONTENDERS:
        assert sum(name.startswith(f"rates/{contender.name}-512-") for name in names) == 3
        assert {f"extrapolation/{contender.name}-{length}-seed0" for length in (512, 1024)} <= set(names)
    assert {f"extrapolation/{name}-512-seed{seed}" for name in ("alibi", "sinusoidal") for seed in (0, 1, 2)} <= set(
        names
    )
    assert "extrapolation/sinusoidal-2048-seed0" in names
    for attention in ("auto", "dense"):  # the headline's speeds
        assert {
            f"speed/{name}-{attention}-{length}" for name in ("alibi", "sinusoidal") for length in (512, 1024, 2048)
        } < {*names}
    try_all(modules, tmp_path, size, dict.fromkeys(size.rates, 3.0))
    (unit,) = (unit for unit in found["short"] if unit.name == "extrapolation/alibi-512-seed0")
    tests = [command for command in unit.commands(tmp_path) if command[0] == "evaluate"]
    lengths = {int(word) for command in tests for word in command if word.isdigit()}
    assert {512, 1024, 16384, 32768, 65536} <= lengths


def test_the_best_rate_is_that_of_the_lowest_validation_loss(modules: Modules, tmp_path: Path) -> None:
    size = modules.plan.SIZES["full"]
    try_all(modules, tmp_path, size, {"0.0007": 3.1, "0.0014": None, "0.0028": 2.9})
    tries = modules.plan.tried(modules.plan.CONTENDERS[0], size)
    assert modules.plan.best_rate(tries, tmp_path) == "0.0028"
    for name in tries.values():
        (tmp_path / name / "metrics.jsonl").write_text("")
    with pytest.raises(RuntimeError, match="no learning rate of rates/alibi-512"):
        modules.plan.best_rate(tries, tmp_path)


class Runner:
    """A runner whose units are short programs."""

    def __init__(self, modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.modules, self.results, self.units = modules, tmp_path / "results", []
        self.program = tmp_path / "unit.py"
        self.program.write_text(
            "import sys, time, json, pathlib\n"
            "name = sys.argv[sys.argv.index('--unit') + 1]\n"
            "time.sleep(60 if 'slow' in name else 0)\n"
            "if 'broken' in name: sys.exit('it broke')\n"
            "folder = pathlib.Path(sys.argv[sys.argv.index('--results') + 1]) / name\n"
            "folder.mkdir(parents=True)\n"
            "(folder / 'made.json').write_text(json.dumps({'kind': 'kind of 1 s', 'seconds': 1.0}))\n"
        )
        monkeypatch.setattr(modules.run, "HERE", tmp_path)
        self.program.rename(tmp_path / "run.py")
        given = {"limit": 30.0, "jobs": 2, "pack": tmp_path / "out" / "p.tar.gz", "size": "full", "commit": "abc"}
        given |= {"data": "d", "texts": "t", "scratch": str(tmp_path / "scratch"), "results": self.results}
        self.options = modules.run.argparse.Namespace(**(given | options))

    def unit(self, name: str, seconds: int = 1, **more: Any) -> Any:
        return self.modules.plan.Unit(name, f"kind of {seconds} s", seconds, lambda results: [], (name,), **more)

    def run(self, *units: Any) -> int:
        return int(self.modules.run._Runner(units, self.options).run())

    def packed(self) -> set[str]:
        with tarfile.open(self.options.pack) as file:
            return {name.removesuffix("/made.json") for name in file.getnames() if name.endswith("made.json")}


def test_units_are_worked_off_once_and_after_what_they_need(
    modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Runner(modules, tmp_path, monkeypatch)
    units = [runner.unit("a/last", needs=("a/first",)), runner.unit("a/first"), runner.unit("a/alone", alone=True)]
    assert runner.run(*units) == 0
    assert runner.packed() == {"a/first", "a/last", "a/alone"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines if " done in " in line].index("a/first") == 0
    assert runner.run(*units) == 0
    assert capsys.readouterr().out.startswith("0 units to do")


def test_units_keep_their_order_where_one_must_be_alone(
    modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not put off until all others are done."""
    runner = Runner(modules, tmp_path, monkeypatch)
    units = [runner.unit("a/1"), runner.unit("a/2", alone=True), runner.unit("a/3"), runner.unit("a/4")]
    assert runner.run(*units) == 0
    done = [line.split()[2] for line in capsys.readouterr().out.splitlines() if " done in " in line]
    assert done[:2] == ["a/1", "a/2"]


def test_some_methods_alone(
    modules: Modules, places: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = modules.plan.SIZES["full"]
    found = [unit for part in ("speed", "short") for unit in modules.plan.units(part, size, places, ["alibi", "t5"])]
    assert {unit.contender for unit in found} == {"alibi", "t5"}
    assert all(need in {unit.name for unit in found} for unit in found for need in unit.needs)
    first = [unit.name for unit in modules.plan.units("speed", size, places)][:4]
    assert first == [f"speed/{name}-dense-512" for name in ("alibi", "sinusoidal", "rotary", "t5")]
    monkeypatch.setattr(sys, "argv", ["run.py", "short", "--only", "alibii"])
    with pytest.raises(SystemExit):
        modules.run.main()
    assert "there is no method 'alibii'" in capsys.readouterr().err


def test_what_would_not_end_in_time_is_not_begun(
    modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(modules, tmp_path, monkeypatch)
    assert runner.run(runner.unit("a/long", seconds=31), runner.unit("a/short")) == 0
    assert runner.packed() == {"a/short"}


@pytest.mark.slow
def test_a_unit_that_is_cut_off_or_breaks_costs_no_other(
    modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Runner(modules, tmp_path, monkeypatch, limit=3.0)
    assert runner.run(runner.unit("a/slow"), runner.unit("a/broken"), runner.unit("a/good")) == 1
    assert runner.packed() == {"a/good"}
    said = capsys.readouterr().out
    assert "a/slow: stopped, and lost" in said
    assert "it broke" in said


def test_nothing_goes_on_without_a_runner_that_was_stopped(
    modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Runner(modules, tmp_path, monkeypatch)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        runner.run(runner.unit("a/slow"))
    assert "a/slow: stopped, and lost" in capsys.readouterr().out


def work(modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    """Run the unit of that name as its process does, with a small text; the folder of results."""
    if not (tmp_path / "data").exists():
        small_data(tmp_path)
        (tmp_path / "texts").mkdir()
        text = " ".join(f"line {number} says {number * number % 97}" for number in range(3000))
        for book in ("wikitext-103-valid", "a-book", "b-book"):
            (tmp_path / "texts" / f"{book}.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    places = ["--data", "data", "--texts", "texts", "--results", "results", "--scratch", "scratch", "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["run.py", "--size", "rehearsal", *places, "--unit", name])
    with open(2, "w", closefd=False) as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)  # pytest's own does not write where the process does
        assert modules.run.main() == 0
    return tmp_path / "results"


def test_a_rate_that_diverges_is_a_result(modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through trainshort train: as a try, and where it is the best there is."""
    size = dataclasses.replace(modules.plan.SIZES["rehearsal"], rates=("0.001", "1e30"))
    monkeypatch.setitem(modules.plan.SIZES, "rehearsal", size)
    results = work(modules, tmp_path, monkeypatch, "rates/alibi-32-lr1e30")
    made = json.loads((results / "rates/alibi-32-lr1e30/made.json").read_text())
    assert [(each["command"][0], each["error"]) for each in made["failed"]] == [("train", "diverged")]
    assert [command[:2] for command in made["commands"]] == [["trainshort", "train"]]
    tries = modules.plan.tried(modules.plan.CONTENDERS[0], size)
    with pytest.raises(RuntimeError, match="no learning rate"):
        modules.plan.best_rate(tries, results)
    shutil.copytree(results / tries["1e30"], results / tries["0.001"])
    (results / tries["0.001"] / "metrics.jsonl").write_text('{"step": 12, "validation_loss": 5.0}\n')
    (results / tries["0.001"] / "made.json").write_text('{"failed": []}')
    assert modules.plan.best_rate(tries, results) == "0.001"
    monkeypatch.setattr(modules.plan, "best_rate", lambda tries, results: "1e30")
    results = work(modules, tmp_path, monkeypatch, "extrapolation/alibi-64-seed0")
    (run,) = modules.found.Found(results).trained
    assert run.diverged
    assert not run.records
    assert (results / "scaled/alibi-64-seed0-ntk/made.json").exists()  # so that nobody waits for it


def test_what_was_made_says_what_was_so(modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment, and no use of the GPU by a run that shared it."""
    monkeypatch.delenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PAPER_JOBS", "2")
    monkeypatch.setattr("trainshort.training.train.matrix_rate", lambda device: 1e12)
    name = "rates/alibi-32-lr0.001"
    results = work(modules, tmp_path, monkeypatch, name)
    assert json.loads((results / name / "made.json").read_text())["environment"] == {"OMP_NUM_THREADS": "1"}
    assert "mfu" in (tmp_path / "scratch" / name / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in (results / name / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["validation_loss"] > 0
    assert not any("mfu" in row for row in rows)


def test_a_copy_of_weights_is_whole_or_not_there(
    modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = modules.run
    unit = modules.plan.Unit("a/run", "full", 1, lambda results: [], ("a/run",), tries={"1": "rates/x"})
    best, copy = tmp_path / "rates" / "x", tmp_path / "a" / "run"
    best.mkdir(parents=True)
    (best / "model.safetensors").write_text("weights")
    monkeypatch.setattr(run, "best_rate", lambda tries, results: "1")

    def stopped(source: Path, target: Path) -> None:
        target.mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", stopped)
        with pytest.raises(KeyboardInterrupt):
            run._take_over(unit, tmp_path, tmp_path)
    assert not copy.exists()
    run._take_over(unit, tmp_path, tmp_path)
    assert (copy / "model.safetensors").read_text() == "weights"
    assert [path.name for path in copy.parent.iterdir()] == ["run"]


def test_there_is_a_page_where_there_are_results_and_it_says_what_they_say(modules: Modules) -> None:
    text = modules.page.page_of(modules.found.Found(ROOT / "results"))
    page = ROOT / "docs" / "reproducing.md"
    assert (page.read_text() if page.exists() else None) == text
    if text is not None:
        figures = {line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")}
        assert all((page.parent / figure).exists() for figure in figures)


def make_run(results: Path, name: str, perplexities: dict[int, float], **train: Any) -> None:
    """As run.py leaves it."""
    folder = results / name
    (folder / "state").mkdir(parents=True)
    length = next(int(word) for word in name.split("-") if word.isdigit())
    values = {"position": name.split("/")[1].split("-")[0], "length": length, "seed": 0, "steps": 4, "lr": 0.001}
    (folder / "train.json").write_text(json.dumps(values | {"batch_tokens": 64} | train))
    model = {"num_layers": 1, "d_model": 8, "num_heads": 2, "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps({"format": "trainshort", "model": model}))
    rows = [{"step": step, "loss": 5.0 - step, "tokens": 64 * step, "seconds": 10.0 + step} for step in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "mode": "nonoverlapping",
        "split": "text",
        "data": "text x",
        "data_folder": "texts/wikitext-103-valid.txt",
    }
    common |= {"first_token": 1, "end_token": 100, "whole_text": True, "dtype": "float32", "model": "abc"}
    records = [
        common | {"length": at, "stride": at, "perplexity": value, "bits_per_byte": 1.0, "perplexity_per_word": 9.0}
        for at, value in perplexities.items()
    ]
    (folder / "evaluation.json").write_text(
        json.dumps({"format": "trainshort evaluation", "version": 2, "records": records})
    )
    (folder / "state" / "state.json").write_text(json.dumps({"finished": True, "peak_memory_bytes": 1000}))
    made = {"unit": name, "kind": "full", "seconds": 60.0, "commit": "abc", "failed": []}
    made |= {"machine": {"gpu": "NVIDIA H200", "torch": "2.11.0", "python": "3.12"}}
    (folder / "made.json").write_text(json.dumps(made))


def verdict_of(modules: Modules, results: Path, words: str) -> str:
    (claim,) = (claim for claim in modules.claims.CLAIMS if claim.says.startswith(words))
    return str(modules.claims.verdict(claim.checks(modules.found.Found(results))))


def test_verdicts_follow_their_rules(modules: Modules, tmp_path: Path) -> None:
    make_run(tmp_path, "extrapolation/alibi-512-seed0", {512: 20.0, 1024: 19.0, 16384: 19.5})
    make_run(tmp_path, "extrapolation/sinusoidal-512-seed0", {512: 20.0, 1024: 29.0})
    make_run(tmp_path, "extrapolation/sinusoidal-1024-seed0", {1024: 18.9, 2048: 40.0})
    assert verdict_of(modules, tmp_path, "ALiBi trained at L works") == "holds (1 of 2 tested)"
    assert verdict_of(modules, tmp_path, "Sinusoidal") == "holds in part"  # 1.45 at 512, 2.1 at 1,024
    one_of_two = verdict_of(modules, tmp_path, "ALiBi trained at L is as good")
    assert one_of_two == "holds (1 of 2 tested)"  # half a percent above
    assert verdict_of(modules, tmp_path, "Rotary") == "not tested"
    assert verdict_of(modules, tmp_path, "At 1.3 billion") == "not tested"
    make_run(tmp_path, "extrapolation/alibi-1024-seed0", {1024: 19.0, 2048: 18.0, 16384: 19.1})
    assert verdict_of(modules, tmp_path, "ALiBi trained at L works") == "holds in part"


def test_rotary_goes_further_than_sinusoidal_and_fails_then(modules: Modules, tmp_path: Path) -> None:
    make_run(tmp_path, "extrapolation/rotary-512-seed0", {512: 20.0, 1024: 22.0, 2048: 30.0})
    make_run(tmp_path, "extrapolation/sinusoidal-512-seed0", {512: 20.0, 1024: 40.0})
    assert verdict_of(modules, tmp_path, "Rotary") == "holds"
    shutil.rmtree(tmp_path / "extrapolation/sinusoidal-512-seed0")
    make_run(tmp_path, "extrapolation/sinusoidal-512-seed0", {512: 20.0, 1024: 21.0})
    assert verdict_of(modules, tmp_path, "Rotary") == "holds in part"


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [((20.0, 20.1), "holds"), ((20.0, 23.0), "undecided"), ((24.0, 24.1), "does not hold here")],
)
def test_seeds_say_whether_a_percent_decides(
    modules: Modules, tmp_path: Path, seeds: tuple[float, ...], expected: str
) -> None:
    """ALiBi at twice its length against sinusoidal trained there, which is tested once."""
    for seed, value in enumerate(seeds):
        make_run(tmp_path, f"extrapolation/alibi-512-seed{seed}", {512: 21.0, 1024: value}, seed=seed)
        make_run(tmp_path, f"extrapolation/sinusoidal-512-seed{seed}", {512: 21.0 + seed / 10}, seed=seed)
    make_run(tmp_path, "extrapolation/sinusoidal-1024-seed0", {1024: 21.0})
    (claim,) = (each for each in modules.claims.CLAIMS if each.says.startswith("ALiBi trained at L is as good"))
    first, second = claim.checks(modules.found.Found(tmp_path))
    assert modules.claims.verdict([first]) == expected
    assert "±" in first.found
    assert second.met is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((17.98, 17.92, 18.2, 18.28), "holds"),
        ((17.98, 17.96, 18.2, 18.28), "does not hold here"),  # by a tenth of a percent
        ((17.98, 17.92, 17.8, 17.7), "does not hold here"),  # the longest is the best
    ],
)
def test_a_peak_is_better_than_both_ends_by_something(
    modules: Modules, tmp_path: Path, values: tuple[float, ...], expected: str
) -> None:
    make_run(tmp_path, "extrapolation/alibi-512-seed0", {512: 20.0})
    path = tmp_path / "extrapolation/alibi-512-seed0/evaluation.json"
    content = json.loads(path.read_text())
    slid = content["records"][0] | {"mode": "sliding", "stride": 16, "whole_text": False}
    lengths = (512, 1024, 1536, 2048)
    content["records"] += [
        slid | {"length": at, "perplexity": value} for at, value in zip(lengths, values, strict=True)
    ]
    path.write_text(json.dumps(content))
    assert verdict_of(modules, tmp_path, "With full windows") == expected
    page = modules.page.page_of(modules.found.Found(tmp_path))
    assert f"17.98 at 512, {values[1]:.2f} at 1,024, {values[2]:.2f} at 1,536" in page
    assert f"| ALiBi, L = 512 | 17.98 | {values[1]:.2f} |" in page


@pytest.mark.parametrize(("dense", "expected"), [(1.2, "holds"), (1.05, "does not hold here")])
def test_speeds_are_those_of_the_later_half(modules: Modules, tmp_path: Path, dense: float, expected: str) -> None:
    for name, speed, memory in (("alibi", dense, 800), ("sinusoidal", 1.0, 1000)):
        for length in (512, 1024, 2048):
            folder = tmp_path / f"speed/{name}-dense-{length}"
            make_run(tmp_path, f"speed/{name}-dense-{length}", {})
            seconds = [100.0 + step / speed for step in range(4)]  # the first step compiled
            rows = [
                {"step": step, "loss": 1.0, "tokens": 64 * step, "seconds": at} for step, at in enumerate(seconds, 1)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            used = memory if expected == "holds" else 1000
            (folder / "state" / "state.json").write_text(json.dumps({"finished": True, "peak_memory_bytes": used}))
    make_run(tmp_path, "extrapolation/alibi-512-seed0", {512: 20.0})
    assert verdict_of(modules, tmp_path, "and trains faster") == expected
    found = modules.found.Found(tmp_path)
    assert found.speed("alibi", "dense", 512).training_speed == pytest.approx(64 * dense)


def test_the_page_has_the_numbers_and_the_figures(modules: Modules, tmp_path: Path) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    docs.mkdir()
    assert modules.page.main(results, docs) == 0
    assert list(docs.iterdir()) == []  # no page without results
    make_run(results, "extrapolation/alibi-512-seed0", {512: 20.0, 1024: 18.5})
    make_run(results, "extrapolation/alibi-512-seed1", {512: 21.0, 1024: 19.5}, seed=1)
    make_run(results, "extrapolation/sinusoidal-512-seed0", {512: 20.0, 1024: 40.0})
    assert modules.page.main(results, docs) == 0
    text = (docs / "reproducing.md").read_text()
    assert "| ALiBi (2 seeds) | 20.50 ± 0.71 (×1.00) | 19.00 ± 0.71 (×0.93) |" in text
    assert "| sinusoidal | 20.00 (×1.00) | 40.00 (×2.00) |" in text
    assert "The paper's Table 2" in text
    assert "| sinusoidal | 20.05 (×1.00) | 43.54 (×2.17) |" in text
    assert "NVIDIA H200; torch 2.11.0; commits abc" in text
    for line in text.splitlines():
        if line.startswith("!["):
            assert (docs / line.split("](")[1].rstrip(")")).read_bytes().startswith(b"<?xml")


def fail(results: Path, name: str, command: str, error: str) -> None:
    path = results / name / "made.json"
    failed = [{"command": [command, "--out", f"scratch/{name}"], "error": error}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failed": failed}))
    if command == "train":  # its folder has the checkpoint of step 0
        (results / name / "state/state.json").write_text(json.dumps({"finished": False, "peak_memory_bytes": 1}))


def test_what_ran_out_of_memory_says_so(modules: Modules, tmp_path: Path) -> None:
    """In words, where its figures from before training would stand; what was measured all the same is shown."""
    make_run(tmp_path, "extrapolation/alibi-512-seed0", {512: 20.0})
    for name in ("alibi-dense-512", "sinusoidal-dense-1024"):
        make_run(tmp_path, f"speed/{name}", {512: 300.0})
        path = tmp_path / f"speed/{name}/evaluation.json"
        path.write_text(path.read_text().replace('"whole_text"', '"tokens_per_second": 7000, "whole_text"'))
    fail(tmp_path, "speed/alibi-dense-512", "train", "not enough memory")
    fail(tmp_path, "speed/sinusoidal-dense-1024", "evaluate", "not enough memory")
    page = modules.page.page_of(modules.found.Found(tmp_path))
    assert "| ALiBi: training, tokens/s | out of memory | – |" in page
    assert "| ALiBi: training, GB | out of memory | – |" in page
    assert "| ALiBi: evaluation, tokens/s | 7k | – |" in page
    assert "| sinusoidal: training, tokens/s | – | 0k |" in page
    assert "| sinusoidal: evaluation, tokens/s | – | out of memory |" in page
    assert "| ALiBi | 512 | 1,024 | – | out of memory | out of memory | – | – |" in page
    assert "memory, L = 512 over sinusoidal L = 1,024: ALiBi at 512 ran out of memory" in page
    assert verdict_of(modules, tmp_path, "and trains faster") == "not tested"
    assert "With today's kernels" not in page  # a table of nothing


def test_the_page_names_what_diverged_and_where_rates_end(modules: Modules, tmp_path: Path) -> None:
    make_run(tmp_path, "extrapolation/alibi-512-seed0", {512: 20.0}, lr=0.002)
    make_run(tmp_path, "extrapolation/t5-512-seed0", {}, lr=0.001)
    fail(tmp_path, "extrapolation/t5-512-seed0", "train", "diverged")
    for name in ("alibi", "t5"):
        for place, rate in enumerate((0.0005, 0.001, 0.002)):
            make_run(tmp_path, f"rates/{name}-512-lr{rate}", {}, lr=rate)
            row = {"step": 4, "validation_loss": 3.0 - place / 10}
            (tmp_path / f"rates/{name}-512-lr{rate}/metrics.jsonl").write_text(json.dumps(row) + "\n")
    fail(tmp_path, "rates/t5-512-lr0.002", "train", "diverged")
    page = modules.page.page_of(modules.found.Found(tmp_path))
    assert "| T5 bias | diverged |" in page
    assert "| ALiBi | 0.001 | 2.9000 |  |" in page
    assert (
        "| ALiBi | 0.002 | 2.8000 | used everywhere; the highest that was tried: a better one may lie beyond |"
        in page
    )
    assert "| T5 bias | 0.001 | 2.9000 | used everywhere |" in page
    assert "| T5 bias | 0.002 | diverged |  |" in page


def recalled(results: Path, name: str, **correct: dict[int, list[int]]) -> None:
    """correct: by task and length, of 10 trials at three depths."""
    common = {"model": "abc", "data": "text", "split": "text", "dtype": "float32", "seed": 0}
    common |= {"depths": [0, 50, 100], "trials": 10, "choices": 8}
    records = [
        common | {"task": task, "length": length, "correct": counts}
        for task, by_length in correct.items()
        for length, counts in by_length.items()
    ]
    content = {"format": "trainshort recall", "version": 1, "records": records}
    (results / name / "recall.json").write_text(json.dumps(content))


def test_recall_is_over_seeds_by_depth_and_with_methods_stretched(modules: Modules, tmp_path: Path) -> None:
    for seed, correct in enumerate(([2, 4, 6], [4, 6, 8])):
        make_run(tmp_path, f"extrapolation/alibi-512-seed{seed}", {512: 20.0, 1024: 21.0}, seed=seed)
        recalled(tmp_path, f"extrapolation/alibi-512-seed{seed}", passkey={512: correct, 1024: correct})
    make_run(tmp_path, "scaled/alibi-512-seed0-ntk", {512: 20.0, 1024: 20.5})
    (tmp_path / "scaled/alibi-512-seed0-ntk/train.json").unlink()
    path = tmp_path / "scaled/alibi-512-seed0-ntk/evaluation.json"
    about = {"name": "alibi-512-seed0-scaling=ntk", "weights": "abc", "length": 512, "model": {"position": "alibi"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"about": about}))
    recalled(tmp_path, "scaled/alibi-512-seed0-ntk", passkey={512: [1, 1, 1]})
    found = modules.found.Found(tmp_path)
    page = modules.page.page_of(found)
    assert "of 10 windows x 3 depths; chance is 12.5%" in page
    assert "| ALiBi (2 seeds) | 50% (30, 50, 70) | 50% |" in page
    assert "| ALiBi, scaled: ntk | 10% (10, 10, 10) | – |" in page
    assert "| ALiBi, scaled: ntk | 20.00 (×1.00) | 20.50 (×1.02) |" in page
    figures = {each.name: each for each in modules.drawing.of_scaled(found, 512)}
    assert set(figures) == {"scaled_extrapolation-512", "scaled_recall_passkey-512"}
    names = [trace["name"] for trace in figures["scaled_recall_passkey-512"].chart.views[0].traces]
    assert names == ["ALiBi", "ALiBi, scaled: ntk", "chance"]


def test_speeds_alone_make_a_page(modules: Modules, tmp_path: Path) -> None:
    for name, length in (("alibi", 512), ("sinusoidal", 1024)):
        make_run(tmp_path, f"speed/{name}-dense-{length}", {})
    page = modules.page.page_of(modules.found.Found(tmp_path))
    assert "NVIDIA H200; torch 2.11.0; commits abc" in page
    assert "tokens/s, L = 512 over sinusoidal L = 1,024: 1.000" in page
    assert "| ALiBi | 512 | 1,024 | – | 0k | 0.00 | – | – |" in page


def test_sliding_windows_and_what_heads_see(modules: Modules, tmp_path: Path) -> None:
    """By the short length on WikiText, by half their length on books."""
    make_run(tmp_path, "extrapolation/alibi-512-seed0", {512: 20.0})
    path = tmp_path / "extrapolation/alibi-512-seed0/evaluation.json"
    content = json.loads(path.read_text())
    slid = content["records"][0] | {"mode": "sliding"}
    content["records"] += [slid | {"length": at, "stride": 512, "perplexity": at / 100} for at in (512, 2048)]
    book = slid | {"data_folder": "texts/a-book.txt", "data": "text y"}
    content["records"] += [book | {"length": at, "stride": at // 2, "perplexity": at / 50} for at in (512, 2048)]
    path.write_text(json.dumps(content))
    heads = {"visited": [[0.5]], "reach": [[9.0]], "needed": [[7.0]], "farthest": [[30]]}
    inspection = {"penalty": True, "heads": heads, "text": {"tokens": 16384}}
    (path.parent / "inspection.json").write_text(json.dumps(inspection))
    page = modules.page.page_of(modules.found.Found(tmp_path))
    assert "with windows that slide by 512 tokens:" in page
    assert "| ALiBi | 5.12 (×1.00) | 20.48 (×4.00) |" in page
    assert "with windows that slide by half their length:" in page
    assert "| ALiBi | 10.24 (×1.00) | 40.96 (×4.00) |" in page
    assert "sinusoidal 18.67, rotary 18.72" in page
    assert "Of a text of 16,384 tokens" in page


def test_captions_say_what_is_drawn(modules: Modules, tmp_path: Path) -> None:
    make_run(tmp_path, "extrapolation/alibi-512-seed0", {512: 20.0, 1024: 18.5})
    make_run(tmp_path, "extrapolation/sinusoidal-512-seed0", {512: 20.0, 1024: 4000.0})
    for way, length in (("dense", 512), ("auto", 512), ("auto", 1024)):
        make_run(tmp_path, f"speed/alibi-{way}-{length}", {})
    found = modules.found.Found(tmp_path)
    (figure,) = modules.drawing.of_trained(found, 512)
    assert figure.caption == (
        "Perplexity per token on wikitext-103-valid by test length, in nonoverlapping windows; "
        "trained at 512 tokens; the scale upwards is finest at its lower end"
    )
    speeds = {each.name: each.chart.views[0] for each in modules.drawing.of_speed(found)}
    assert set(speeds) == {"speed_training", "speed_memory"}  # nothing was tested
    full, dashed = speeds["speed_memory"].traces
    assert (full["x"], full["y"], full["line"]["dash"]) == ([512, 1024], [1e-6, 1e-6], "solid")
    assert (dashed["x"], dashed["line"]["dash"]) == ([512], "dash")
