"""Recall in the report: shares by length and depth, over seeds, and files that are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.made import WEIGHTS, make_run
from trainshort.report.build import build_report, content_of
from trainshort.report.charts import Chart
from trainshort.report.reading import read_runs


def recalled(task: str, length: int, correct: list[int], **changes: Any) -> dict[str, Any]:
    """As `evaluate --task recall` writes it."""
    return {
        "model": WEIGHTS[:16],
        "data": "text",
        "split": "validation",
        "dtype": "float32",
        "task": task,
        "length": length,
        "depths": [0, 50, 100],
        "trials": 20,
        "choices": 4,
        "seed": 0,
        "correct": correct,
    } | changes


def write(folder: Path, *records: Any, **more: Any) -> None:
    content = {"format": "trainshort recall", "version": 1, "records": list(records)} | more
    (folder / "recall.json").write_text(json.dumps(content))


def charts(folder: Path) -> list[Chart]:
    content = content_of(read_runs([folder]), title=None)
    return [chart for chart in content.charts if chart.name == "recall"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for position in ("alibi", "rotary"):
        make_run(folder / position, position)
    make_run(folder / "alibi-1", "alibi", seed=1)
    write(folder / "alibi", recalled("passkey", 64, [20, 20, 20]), recalled("passkey", 256, [0, 10, 20]))
    write(folder / "alibi-1", recalled("passkey", 64, [20, 20, 20]), recalled("passkey", 256, [10, 10, 10]))
    write(folder / "rotary", recalled("passkey", 64, [10, 10, 10]), recalled("copy", 64, [5, 5, 5]))
    return folder


def test_shares_are_means_over_depths_and_seeds(runs: Path) -> None:
    (chart,) = charts(runs)
    by_length = next(view for view in chart.views if view.name == "a passkey, by length")
    lines = {trace["name"]: (trace["x"], trace["y"]) for trace in by_length.traces}
    assert lines["ALiBi"] == ([64, 256], [1.0, 0.5])
    assert lines["Rotary"] == ([64], [0.5])
    assert lines["chance"] == ([64, 256], [0.25, 0.25])
    by_depth = next(
        view for view in chart.views if view.name == "a passkey, by depth at 64"
    )  # both were tested there
    assert {trace["name"] for trace in by_depth.traces} == {"ALiBi", "Rotary", "chance"}
    assert chart.table is not None
    assert ("ALiBi", "passkey", 256, 0, 0.25, 20, 0.25, 2) in chart.table.rows


def test_other_trials_have_a_chart_of_their_own(runs: Path) -> None:
    write(runs / "rotary", recalled("passkey", 64, [10, 10, 10], choices=8))
    first, second = charts(runs)
    assert (first.id, second.id) == ("recall", "recall_2")
    assert {trace["name"] for trace in second.views[0].traces} == {"Rotary", "chance"}


def test_dtypes_of_one_run_are_not_taken_for_seeds(runs: Path) -> None:
    halves = recalled("passkey", 64, [0, 0, 0], dtype="bfloat16")
    write(runs / "alibi", recalled("passkey", 64, [20, 20, 20]), halves)
    first, second = charts(runs)
    assert ("in float32" in first.sentence, "in bfloat16" in second.sentence) == (True, True)
    assert second.table is not None
    assert [row[4:] for row in second.table.rows] == [(0.0, 20, 0.25, 1)] * 3
    write(runs / "alibi", halves)  # runs may differ, as public models do
    (chart,) = charts(runs)
    assert "in bfloat16 and float32" in chart.sentence


def test_files_of_the_report(runs: Path, tmp_path: Path) -> None:
    build_report([runs], tmp_path / "report", dots=40)
    names = {path.name for path in (tmp_path / "report" / "figures").glob("recall*")}
    assert names == {f"recall_{task}.{kind}" for task in ("passkey", "copy") for kind in ("svg", "png")}
    assert (tmp_path / "report" / "tables" / "recall.csv").read_text().startswith("method,task,tested_at,depth,right")


@pytest.mark.parametrize(
    "damaged",
    [
        3,
        recalled("passkey", 64, [1, 2]),
        recalled("passkey", 64, [1, 2, 21]),
        recalled("passkey", 0, [1, 2, 3]),
        recalled("passkey", 64, [1, 2, 3], choices=0),
        recalled("passkey", 64, [1, 2, 3], depths="all"),
        recalled("passkey", 64, [1, 2, 3], model=None),
    ],
)
def test_damaged_records_are_left_out_and_named(runs: Path, damaged: Any) -> None:
    write(runs / "alibi", recalled("passkey", 64, [20, 20, 20]), damaged)
    found = read_runs([runs])
    run = next(each for each in found.runs if each.name == "alibi")
    assert [each["correct"] for each in run.recall] == [[20, 20, 20]]
    assert any("1 of 2 records are damaged" in each.what for each in found.problems)


def test_records_of_other_weights_are_left_out_and_named(runs: Path) -> None:
    write(runs / "alibi", recalled("passkey", 64, [20, 20, 20], model="f" * 16))
    found = read_runs([runs])
    assert next(each for each in found.runs if each.name == "alibi").recall == []
    assert any("other weights" in each.what for each in found.problems)


def test_a_model_from_elsewhere_that_was_asked_to_recall_only(tmp_path: Path) -> None:
    folder = tmp_path / "bloom"
    folder.mkdir()
    about = {"name": "bloom-560m", "folder": "models/bloom-560m", "weights": "a" * 16, "length": 64, "model": {}}
    write(folder, recalled("copy", 64, [20, 0, 0], model="a" * 16), about=about)
    (chart,) = charts(folder)
    assert chart.views[0].traces[0]["name"] == "bloom-560m"
