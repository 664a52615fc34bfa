"""The page of an inspection: every number of its tables comes from the file, and text in it stays text."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from tests.report.parsed import Page
from trainshort.report.inspected import bound_sentence, build_inspection, summary

EVIL = "<script>window.hacked = 1</script>"
LAYERS, HEADS, LENGTH = 2, 3, 512


def grid(start: float, step: float = 0.1) -> list[list[float]]:
    return [[start + step * (layer * HEADS + head) for head in range(HEADS)] for layer in range(LAYERS)]


def found(**changes: Any) -> dict[str, Any]:
    """As inspect leaves it."""
    names = ("visited", "seen", "mattered", "skipped", "diameter", "output")
    heads = {name: grid(0.1) for name in names}
    heads |= {name: grid(10, 20) for name in ("reach", "farthest", "needed", "most_needed", "query", "key")}
    look = {"layer": 1, "head": 2, "needed": 110.0, "distance": 110.0, "query": 300, "key": 190}
    return {
        "format": "trainshort inspection",
        "version": 1,
        "trainshort": "0",
        "length": LENGTH,
        "causal": True,
        "position": "alibi",
        "penalty": True,
        "slopes": [0.5, 0.125, 0.03],
        "tolerance": 2.0**-14,
        "share": 0.99,
        "dtype": "bfloat16",
        "device": "cpu",
        "heads": heads,
        "bound": [[2.0**-14 * value for value in row] for row in heads["diameter"]],
        "by_length": [{"length": length, "visited": grid(0.1), "seen": grid(0.05)} for length in (128, LENGTH)],
        "distances": [0, 1, 2, 4],
        "beyond": [[[0.5, 0.1, 1e-3, 0.0]] * HEADS] * LAYERS,
        "position_edges": [0, 256, 512],
        "by_position": [[[1.0, 2.0]] * HEADS] * LAYERS,
        "about": {"name": f"bloom {EVIL}", "folder": "downloads/bloom", "length": 64, "model": {}, "weights": "0"},
        "text": {"name": f"book {EVIL}", "tokens": LENGTH},
        "looks": [look | {"query_text": EVIL, "key_text": "=1+1"}],
    } | changes


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_files_and_numbers(tmp_path: Path) -> None:
    page = build_inspection(found(), tmp_path / "out", figures=False)
    text = page.read_text()
    assert EVIL not in text
    assert "&lt;script&gt;window.hacked" in text
    rows = rows_of(tmp_path / "out" / "tables" / "heads.csv")
    assert len(rows) == LAYERS * HEADS
    assert (rows[4]["layer"], rows[4]["head"], float(rows[4]["needed_mean"])) == ("2", "2", 90.0)
    assert float(rows[4]["bound"]) == pytest.approx(2.0**-14 * float(rows[4]["diameter_of_values"]))
    layers = rows_of(tmp_path / "out" / "tables" / "layers.csv")
    assert [float(row["bound"]) for row in layers] == pytest.approx([2.0**-14 * 0.3, 2.0**-14 * 0.6])
    assert rows_of(tmp_path / "out" / "tables" / "looks.csv")[0]["text_up_to_there"] == "'=1+1"
    names = [chart["name"] for chart in Page(page).data["charts"]]
    assert names == ["heads", "visited", "distance", "positions"]
    assert "2⁻¹⁴ of a query" in re.sub(r"\s+", " ", text)


@pytest.mark.slow
def test_figures_are_drawn(tmp_path: Path) -> None:
    build_inspection(found(), tmp_path, dots=50)
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"heads_can_see.svg", "heads_visited.png", "visited.svg", "distance.png", "positions.svg"} <= names
    (tmp_path / "figures" / "mine.svg").write_text("mine")
    build_inspection(found(), tmp_path, figures=False)
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["mine.svg"], "old figures go, others stay"


def test_sentences_say_what_was_found() -> None:
    lines = summary(found())
    assert lines[0].startswith("At 512 tokens 65.0% of the keys in sight are proved not to matter")
    assert "head 3 of layer 2" in lines[1]
    assert "trained at 64 tokens: 3 of 6 heads need more" in lines[2]
    assert "3.7e-05" in bound_sentence(found())


def test_without_a_penalty_everything_is_seen(tmp_path: Path) -> None:
    values = found(penalty=False, bound=None, slopes=None, position="rotary")
    assert "no key can be proved not to matter" in summary(values)[0]
    assert bound_sentence(values).startswith("Nothing is skipped")
    page = build_inspection(values, tmp_path, figures=False)
    assert "With rotary positions" in page.read_text()
    heads, *others = Page(page).data["charts"]
    assert [chart["name"] for chart in others] == ["distance", "positions"], "no chart in which everything is 100%"
    assert heads["views"][0]["traces"][0]["z"] == values["heads"]["needed"]
    assert "What leaving keys out can cost" not in page.read_text()
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {
        "heads.csv", "looks.csv", "distance.csv", "positions.csv"
    }  # fmt: skip
