"""Every file that a report reads, changed in every way: the report is written, and says what it left out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.hostile_json import EVERY, opened, survives
from tests.report.made import make_run, make_runs
from trainshort.report.build import content_of
from trainshort.report.reading import read_runs


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "one", steps=3)
    make_run(tmp_path / "runs" / "two", "rotary", steps=3)
    entries = [{"folder": name, "position": "alibi", "length": 64, "seed": 0, "lr": 0.1} for name in ("one", "gone")]
    comparison = {"trainshort": "1", "runs": [each | {"training": {"seconds": 3}, "records": []} for each in entries]}
    (tmp_path / "runs" / "comparison.json").write_text(json.dumps(comparison))
    (tmp_path / "runs" / "one" / "samples.json").write_text(json.dumps({"samples": [{"prompt": "a", "text": "b"}]}))
    return tmp_path / "runs"


FILES = ["train.json", "config.json", "state/state.json", "evaluation.json", "samples.json", "../comparison.json"]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", FILES)
def test_files_of_a_run(runs: Path, name: str, every: int) -> None:
    def report() -> None:
        content_of(read_runs([runs]), title=None)

    survives((runs / "one" / name).resolve(), report, home=runs, every=every)


@pytest.mark.parametrize("name", [*FILES, "metrics.jsonl"])
def test_pipes_and_devices(runs: Path, name: str) -> None:
    path = runs / "one" / name
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path.unlink()
        make(path)
        assert len(read_runs([runs]).runs) >= 2


@pytest.mark.parametrize("folder", ["../../etc", "/etc", "a\0b", "..", "x/../../.."])
def test_a_comparison_names_folders_beside_it_only(tmp_path: Path, folder: str) -> None:
    make_runs(tmp_path / "runs")
    entry = {"folder": folder, "position": "alibi", "length": 64, "seed": 0, "records": []}
    (tmp_path / "runs" / "comparison.json").write_text(json.dumps({"runs": [entry]}))
    with opened() as paths:
        found = read_runs([tmp_path / "runs"])
    assert len(found.runs) == 4
    assert all(path.startswith(str(tmp_path)) for path in paths)


def test_lines_of_metrics(runs: Path) -> None:
    with (runs / "one" / "metrics.jsonl").open("a") as file:
        for line in ("[" * 100_000, '{"step": "x"}', '{"step": NaN}', "3", f'{{"step": 1{"0" * 300}}}'):
            file.write(line + "\n")
    found = read_runs([runs / "one"])
    assert [row["step"] for row in found.runs[0].metrics] == [1, 2, 3]
    assert any("5 of 8 lines are damaged" in problem.what for problem in found.problems)
