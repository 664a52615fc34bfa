"""Figures for a paper: files that parse, the same for the same numbers, whatever the names are."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.report.made import make_run, make_runs
from trainshort.report.build import FIGURES, build_report, content_of
from trainshort.report.figures import _apart, drawn
from trainshort.report.reading import read_runs


def test_every_figure_parses(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs", sliding=True)
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"alibi-seed{seed}", seed=seed, factor=1.0 + seed / 10)
    build_report([tmp_path / "runs"], tmp_path / "report", dots=60)
    folder = tmp_path / "report" / "figures"
    made = [name for name in FIGURES if not name.startswith("recall")]  # these runs were not asked to recall
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in made for kind in ("svg", "png")}
    for path in folder.glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 5
        assert "http" not in {str(each)[:4] for node in root.iter() for key, each in node.items() if "href" in key}
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_names_are_not_mathematics(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", "$\\frac{1}$ & <b> 漢字 \\notacommand", model="$")
    make_run(tmp_path / "runs" / "b", "_hidden")
    report = build_report([tmp_path / "runs"], tmp_path / "report", dots=60)
    for path in report.files:
        if path.suffix == ".svg":
            ElementTree.parse(path)


@pytest.mark.slow
def test_the_same_numbers_give_the_same_files(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    contents = []
    for name in ("one", "two"):
        report = build_report([tmp_path / "runs"], tmp_path / name, dots=60)
        contents.append({path.name: path.read_bytes() for path in report.files if path.name != "report.html"})
    assert contents[0] == contents[1]


def figures_of(runs: Path, chart: str) -> dict[str, str]:
    """SVG files by name; the texts in them stand in comments."""
    content = content_of(read_runs([runs]), title=None)
    found = next(each for each in content.charts if each.name == chart)
    return {name: data.decode() for name, data in drawn(found, 60) if name.endswith(".svg")}


def test_a_method_drawn_in_two_ways_is_named_once(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs", sliding=True)
    texts = re.findall(r"<!-- (.*?) -->", figures_of(tmp_path / "runs", "sliding")["sliding.svg"])
    assert [texts.count(name) for name in ("ALiBi", "Rotary", "nonoverlapping", "sliding, stride L/2")] == [1] * 4


def test_long_names_get_room(tmp_path: Path) -> None:
    """One below the other, and the axes as high as before."""
    for number in range(8):
        make_run(tmp_path / "runs" / f"{number}", f"method {number} with a name that takes most of a line")
    text = figures_of(tmp_path / "runs", "extrapolation")["extrapolation.svg"]
    found = re.search(r'width="([0-9.]+)pt" height="([0-9.]+)pt"', text)
    assert found is not None
    assert float(found[1]) == 72 * 5.0
    assert float(found[2]) > 72 * (3.4 + 0.16 * 4)


def test_labels_of_lengths_stand_apart() -> None:
    assert _apart([512, 1024, 1536, 2048], ["512", "1,024", "1,536", "2,048"]) == ["512", "1,024", "", "2,048"]
    assert _apart([100, 300, 1000], ["100", "300", "1,000"]) == ["100", "300", "1,000"]
