"""Figures that can't be compared never stand in one table, and what is left out is named with its cells."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.made import PERPLEXITIES, WEIGHTS, change, make_run, make_runs, record
from tests.report.parsed import Page
from trainshort.report.build import build_report, content_of
from trainshort.report.reading import read_runs

OTHERS: dict[str, dict[str, Any]] = {
    "data": {"data": "another text", "data_folder": "data/books"},
    "split": {"split": "train"},
    "tokens": {"end_token": 513, "scored_tokens": 512},
    "dtype": {"dtype": "bfloat16"},
}


def add(folder: Path, *records: dict[str, Any]) -> None:
    path = folder / "evaluation.json"
    change(path, records=[*json.loads(path.read_text())["records"], *records])


def texts(page: Page, chart: str) -> dict[str, list[float]]:
    return {trace["name"]: trace["y"] for trace in page.chart(chart)["views"][0]["traces"]}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("first", [False, True])
def test_another_test_of_one_run_leaves_the_table_as_it_was(tmp_path: Path, what: str, first: bool) -> None:
    make_runs(tmp_path / "runs")
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"alibi-64-seed{seed}", seed=seed, factor=1.0 + seed / 100)
    before = content_of(read_runs([tmp_path / "runs"]), title=None)
    others = [record(length, 20.0) | OTHERS[what] for length in (64, 128, 256)]
    path = tmp_path / "runs" / "alibi-64-seed1" / "evaluation.json"
    mine = json.loads(path.read_text())["records"]
    change(path, records=[*others, *mine] if first else [*mine, *others])
    after = content_of(read_runs([tmp_path / "runs"]), title=None)
    main, other = after.tables
    assert main.perplexities.cells == before.tables[0].perplexities.cells
    assert after.charts[0].views == before.charts[0].views
    assert [method.label for method in other.perplexities.methods] == ["ALiBi"]
    assert [cell.text for cell in other.perplexities.cells[0] if cell] == ["20.00"] * 3


def test_each_data_set_stands_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshort.report.figures._rendered", lambda name, view, dots: [(f"{name}.svg", b"drawn")])
    folders = make_runs(tmp_path / "runs")
    for folder, factor in zip(folders[:2], (2.0, 3.0), strict=True):
        values = PERPLEXITIES[folder.name.split("-")[0]]
        pairs = zip((64, 128, 256), values, strict=True)
        add(folder, *(record(length, value * factor) | OTHERS["data"] for length, value in pairs))
    page = Page(build_report([tmp_path / "runs"], tmp_path / "report", dots=60).page)
    assert texts(page, "extrapolation")["ALiBi"] == [5.0, 4.5, 4.0]
    assert texts(page, "extrapolation_2") == {"ALiBi": [10.0, 9.0, 8.0], "Rotary": [12.0, 18.0, 36.0]}
    assert "tested in 2 ways that can't be compared: data text; data/books" in page.text
    assert "Perplexity by test length, on data/books" in page.text
    tables, figures = tmp_path / "report" / "tables", tmp_path / "report" / "figures"
    rows = list(csv.DictReader((tables / "extrapolation_2.csv").read_text().splitlines()))
    assert {row["data"] for row in rows} == {"another text"}
    assert "data/books" in (tables / "perplexity_2.tex").read_text()
    assert (figures / "extrapolation_per_word_2.svg").exists()
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    make_run(tmp_path / "alone")
    build_report([tmp_path / "alone"], tmp_path / "report", dots=60)
    assert not [path.name for path in (*tables.iterdir(), *figures.iterdir()) if "_2." in path.name]


def test_the_names_say_what_differs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "alibi")
    for other in OTHERS.values():
        add(folder, record(64, 20.0) | other)
    names = [listed.title for listed in content_of(read_runs([tmp_path]), title=None).tables]
    assert names[0].endswith("on data text, tokens 1 to 1,024, float32") or "validation split" in names[0]
    assert len(set(names)) == 5
    assert sum("data/books" in name for name in names) == 1
    assert sum("train split" in name for name in names) == 1
    assert sum("tokens 1 to 512" in name for name in names) == 1
    assert sum("bfloat16" in name for name in names) == 1


def test_records_of_other_weights_are_named_and_left_out(tmp_path: Path) -> None:
    """A run that was trained further keeps its old records; only those of its weights are shown."""
    folder = make_run(tmp_path / "alibi")
    old = [record(length, 50.0) | {"model": "f" * 16} for length in (64, 128)]
    mine = [record(64, 5.0) | {"model": WEIGHTS[:16]}]
    content = {"format": "trainshort evaluation", "version": 2, "records": [*old, *mine]}
    (folder / "evaluation.json").write_text(json.dumps(content))
    found = read_runs([tmp_path])
    assert [each["perplexity"] for each in found.runs[0].records] == [5.0]
    assert [each.what for each in found.problems] == [
        "nonoverlapping at 64, 128: left out, measured with other weights than the run has now; evaluate again"
    ]


def test_a_comparison_does_not_bring_them_back(tmp_path: Path) -> None:
    """A run that was trained further after a comparison, and not tested again."""
    folder = make_run(tmp_path / "alibi-64-seed0")
    old = [record(64, 50.0) | {"model": "f" * 16}]
    (folder / "evaluation.json").write_text(json.dumps({"version": 2, "records": old}))
    entry = {"folder": folder.name, "position": "alibi", "length": 64, "seed": 0, "records": old}
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": [entry]}))
    found = read_runs([tmp_path])
    assert found.runs[0].records == []
    assert "nonoverlapping at 64: left out" in found.problems[0].what


def test_a_run_that_was_extended_is_another_method(tmp_path: Path) -> None:
    make_run(tmp_path / "plain", seed=0)
    make_run(tmp_path / "newer", seed=1, extended_at=[])
    make_run(tmp_path / "longer", seed=2, extended_at=[5])
    methods = content_of(read_runs([tmp_path]), title=None).methods
    assert {method.label: sorted(method.seeds) for method in methods} == {
        "ALiBi (extended_at null)": [0, 1],
        "ALiBi (extended_at [5])": [2],
    }


def test_records_that_do_not_say_their_data_are_named_and_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "alibi")
    add(folder, record(512, 9.0) | {"data": None}, record(1024, 9.0, "sliding", 64) | {"end_token": None})
    found = read_runs([tmp_path])
    assert [each["length"] for each in found.runs[0].records] == [64, 128, 256]
    (problem,) = found.problems
    assert problem.what.startswith("nonoverlapping at 512; sliding at 1,024: left out, the records do not say")


def test_seeds_that_were_not_tested_are_named(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        make_run(tmp_path / f"alibi-{seed}", seed=seed)
    add(tmp_path / "alibi-1", record(512, 9.0), *(record(each, 20.0) | OTHERS["data"] for each in (64, 128)))
    make_run(tmp_path / "rotary", "rotary")
    content = content_of(read_runs([tmp_path]), title=None)
    main, other = content.tables
    assert [cell.ratio for cell in main.perplexities.cells[0] if cell] == [1.0, 0.9, 0.8, None]  # not of one seed
    assert [cell.deviation for cell in other.perplexities.cells[0] if cell] == [None, None]
    warnings = "\n".join(content.warnings)
    assert (
        "Not all seeds were tested on data text, and means are over those that were: ALiBi at 512: 1 of 3" in warnings
    )
    assert "Not all seeds were tested on data/books, and means are over those that were: ALiBi at 64, 128" in warnings
    assert "different numbers of seeds: ALiBi 3, Rotary 1" in warnings


def test_speeds_of_different_machines_have_no_mean(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"alibi-{seed}", seed=seed)
    path = tmp_path / "alibi-1" / "evaluation.json"
    records = json.loads(path.read_text())["records"]
    change(path, records=[records[0] | {"device": "cuda:0"}, *records[1:]])
    cost = next(chart for chart in content_of(read_runs([tmp_path]), title=None).charts if chart.name == "cost")
    assert cost.views[0].traces[0]["x"] == [128, 256]
    assert cost.notes == ["ALiBi at 64: runs differ in device or threads: no mean"]


def test_speeds_of_a_loaded_machine_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "alibi")
    path = tmp_path / "alibi" / "evaluation.json"
    first, *others = json.loads(path.read_text())["records"]
    change(path, records=[first | {"waiting": 0.42}, *(each | {"waiting": 0.05} for each in others)])
    cost = next(chart for chart in content_of(read_runs([tmp_path]), title=None).charts if chart.name == "cost")
    (note,) = cost.notes
    assert note.startswith("ALiBi at 64 (42%): measured on a loaded machine")


def test_a_gone_run_is_put_with_those_that_differ_in_the_seed_alone(tmp_path: Path) -> None:
    kept = make_run(tmp_path / "alibi-64-seed0")
    config = json.loads((kept / "train.json").read_text())
    gone = {"folder": "alibi-64-seed1", "position": "alibi", "length": 64, "seed": 1, "lr": 0.003}
    gone |= {"config": config | {"seed": 1}, "training": {}, "records": [record(64, 7.0)]}
    runs = [{"folder": kept.name}, gone]
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": runs, "trainshort": "0.1.0"}))
    content = content_of(read_runs([tmp_path]), title=None)
    (method,) = content.methods
    assert method.seeds == [0, 1]
