"""Models that are no runs of ours, beside runs: what can be compared is, and what is not known is left out."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from tests.report.made import LENGTHS, WEIGHTS, change, make_run, record, write
from trainshort.report.build import build_report, content_of
from trainshort.report.reading import read_runs

MODEL = {"position": "alibi", "num_layers": 2, "num_heads": 2, "d_model": 16, "position_options": {}}


def text_records(tokenizer: str, factor: float = 1.0, dtype: str = "float32") -> list[dict[str, Any]]:
    """As evaluate --text writes them."""
    found = []
    for length, perplexity in zip(LENGTHS, (9.0, 8.0, 7.0), strict=True):
        each = record(length, perplexity * factor)
        each |= {"data": "text abc", "split": "text", "data_folder": "book.txt", "dtype": dtype}
        each |= {"tokenizer": tokenizer, "whole_text": True, "model": WEIGHTS[:16]}
        found.append(each | {"end_token": each["end_token"] + len(tokenizer)})
    return found


def make_public(folder: Path, name: str = "bloom-560m", **more: Any) -> Path:
    folder.mkdir(parents=True)
    about = {"name": name, "folder": f"downloads/{name}", "weights": WEIGHTS[:16], "length": 128, "model": MODEL}
    file = {"format": "trainshort evaluation", "version": 2, "about": about, "records": text_records("bpe", **more)}
    write(folder / "evaluation.json", file)
    return folder


def make_own(folder: Path, tokenizer: str = "bytes", **more: Any) -> Path:
    make_run(folder)
    change(folder / "evaluation.json", version=2, records=text_records(tokenizer, 0.5, **more))
    return folder


def test_a_public_model_stands_beside_a_run_by_bits_per_byte(tmp_path: Path) -> None:
    public, own = make_public(tmp_path / "evaluations" / "bloom"), make_own(tmp_path / "own")
    content = content_of(read_runs([public, own]), title=None)
    assert [method.label for method in content.methods] == ["bloom-560m, L = 128", "ALiBi, L = 64"]
    assert content.methods[0].color != content.methods[1].color
    assert not content.problems, "nothing is missing of a model that is no run"
    assert not content.warnings
    (extrapolation,) = (chart for chart in content.charts if chart.name == "extrapolation")
    names = ["bits per byte", "ratio to the trained length", "perplexity per word"]
    assert [view.name for view in extrapolation.views] == names
    assert [len(view.traces) for view in extrapolation.views] == [2, 2, 2]
    assert "different tokenizers" in extrapolation.notes[0]
    (listed,) = content.tables
    assert listed.title == "Bits per byte by test length"
    values = [[cell.value for cell in cells if cell is not None] for cells in listed.perplexities.cells]
    expected = [[each["bits_per_byte"] for each in text_records("x", factor)] for factor in (1.0, 0.5)]
    assert values == expected
    assert [cell.best for cell in listed.perplexities.cells[1] if cell is not None] == [True, True, True]


def test_with_the_same_tokenizer_tokens_are_compared(tmp_path: Path) -> None:
    folders = [make_public(tmp_path / "bloom"), make_own(tmp_path / "own", tokenizer="bpe")]
    content = content_of(read_runs(folders), title=None)
    (extrapolation,) = (chart for chart in content.charts if chart.name == "extrapolation")
    assert extrapolation.views[0].name == "perplexity per token"
    assert not extrapolation.notes


def test_dtypes_may_differ_between_models_and_are_named(tmp_path: Path) -> None:
    folders = [make_public(tmp_path / "bloom", dtype="bfloat16"), make_own(tmp_path / "own")]
    content = content_of(read_runs(folders), title=None)
    assert len(content.tables) == 1
    assert content.warnings == ["Not all were tested in the same dtype: bloom-560m in bfloat16; own in float32."]


def test_one_model_in_two_dtypes_is_two_tests(tmp_path: Path) -> None:
    public = make_public(tmp_path / "bloom")
    records = text_records("bpe") + text_records("bpe", 1.1, "bfloat16")
    change(public / "evaluation.json", records=records)
    content = content_of(read_runs([public]), title=None)
    assert len(content.tables) == 2


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    content = content_of(
        read_runs([make_public(tmp_path / "bloom"), make_public(tmp_path / "mpt", "mpt")]), title=None
    )
    assert not {"Training curves", "Samples"} & content.missing.keys()
    assert content.finding is not None
    assert content.finding.text.startswith(
        "Trained at 128 tokens and tested at 256 (2 times as long), bloom-560m has "
    )
    assert [chart.name for chart in content.charts if chart.name == "training"] == []


def test_a_download_without_figures_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "bloom").mkdir()
    write(tmp_path / "bloom" / "config.json", {"model_type": "bloom"})
    found = read_runs([tmp_path / "bloom", make_own(tmp_path / "own")])
    assert [run.name for run in found.runs] == ["own"]
    assert "trainshort evaluate makes some" in found.problems[0].what


def test_figures_of_other_weights_are_left_out(tmp_path: Path) -> None:
    public = make_public(tmp_path / "bloom")
    records = [*text_records("bpe"), text_records("bpe")[0] | {"model": "f" * 16, "length": 999}]
    change(public / "evaluation.json", records=records)
    found = read_runs([public])
    assert [each["length"] for each in found.runs[0].records] == list(LENGTHS)
    assert "measured with other weights" in found.problems[0].what


def test_the_report_is_written(tmp_path: Path) -> None:
    folders = [make_public(tmp_path / "bloom"), make_own(tmp_path / "own")]
    report = build_report(folders, tmp_path / "out", figures=False)
    assert "bloom-560m" in report.page.read_text()
    rows = list(csv.DictReader((tmp_path / "out" / "tables" / "extrapolation.csv").read_text().splitlines()))
    assert {row["method"] for row in rows} == {"bloom-560m, L = 128", "ALiBi, L = 64"}
    assert all(float(row["perplexity"]) > 1 for row in rows)
