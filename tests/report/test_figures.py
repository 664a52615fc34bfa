"""Figures for a paper: files that parse, the same for the same numbers, whatever the names are."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.report.made import make_run, make_runs
from trainshort.report.build import FIGURES, build_report


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
