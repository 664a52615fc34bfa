"""The examples run, with small settings, and print what they promise; each stays short."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trainshort.cli.main import main
from trainshort.positions import POSITIONS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
TEXT = "In the beginning was a sentence, and it was said again and again. " * 300


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SCRIPTS)
def test_they_are_short_and_say_how_to_run_them(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < 80
    assert f"python examples/{name}" in text
    assert f"[{name}]({name})" in (EXAMPLES / "README.md").read_text()


def test_all_that_is_listed_is_there() -> None:
    listed = re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted([*SCRIPTS, "start.ipynb"])


def test_fast_gpt(capsys: pytest.CaptureFixture[str]) -> None:
    example = load(EXAMPLES / "fast_gpt.py")
    example.main([128])
    length, loss, same, off, *_ = capsys.readouterr().out.splitlines()[-1].split()
    assert length == "128"
    assert abs(float(loss) - float(same)) < 2e-5
    assert float(off) < 1e-5
    changed = [line for line in (EXAMPLES / "fast_gpt.py").read_text().splitlines() if "# changed" in line]
    assert len(changed) == 2


@pytest.mark.slow
def test_endless_text(capsys: pytest.CaptureFixture[str]) -> None:
    load(EXAMPLES / "endless_text.py").main(2200, 1100)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2,200 tokens with either cache: the same"
    (_, first, _, full, *_), (_, second, _, twice, *_) = (line.replace(",", "").split() for line in lines[1:3])
    assert int(twice) == 2 * int(full)
    assert int(second) == int(first) < int(full) / 4


@pytest.mark.slow
def test_irregular_times(capsys: pytest.CaptureFixture[str]) -> None:
    load(EXAMPLES / "irregular_times.py").main(steps=60, lengths=[64, 256])
    found = re.findall(r"fades by (\w+) +spans of +(\d+): ([\d.]+)", capsys.readouterr().out)
    errors = {(fades, int(length)): float(error) for fades, length, error in found}
    assert errors["time", 256] < 1.1 * errors["time", 64] < 0.8
    assert errors["time", 256] < errors["order", 256] < errors["nothing", 256]


def test_the_times_of_irregular_times() -> None:
    """The process is as its docstring says: the examples would show something else otherwise."""
    example = load(EXAMPLES / "irregular_times.py")
    times, truth, measured = example.draw(400, 100, torch.Generator().manual_seed(0))
    assert bool((times.diff(dim=1) >= 0).all())
    assert abs(float(truth.var()) - 1.0) < 0.1
    assert abs(float((measured - truth).std()) - example.NOISE) < 0.02
    near = times.diff(dim=1) < 0.02
    assert float((truth[:, 1:] * truth[:, :-1])[near].mean()) > 0.9


@pytest.mark.slow
@pytest.mark.transformers
def test_patched_bloom(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    load(EXAMPLES / "patched_bloom.py").main([64, 300], 8)
    lines = capsys.readouterr().out.splitlines()
    assert [float(line.split()[1]) < 1e-5 for line in lines[1:3]] == [True, True]
    assert lines[-1] == "8 tokens, written greedily: the same"


@pytest.mark.slow
def test_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    settings = {"steps": 3, "positions": ("alibi", "none"), "length": (16,), "multiples": (1, 2), "test_tokens": 256}
    result = load(EXAMPLES / "comparison.py").main(str(tmp_path / "book.txt"), str(tmp_path / "runs"), **settings)
    assert [run["position"] for run in result["runs"]] == ["alibi", "none"]
    out = capsys.readouterr().out
    said = re.findall(r"(?:alibi|none), trained at 16, (.*) windows of 32: ([+-]\d+\.\d+) nats a token", out)
    assert len(said) == 2
    for verdict, change in said:  # rounded: at the border either word is right
        assert verdict == "is as good in" or abs(float(change)) >= 0.005
        assert verdict != "gains from" or float(change) < 0
        assert verdict != "is hurt by" or float(change) > 0
        assert verdict != "is as good in" or abs(float(change)) <= 0.005
    assert Path(out.splitlines()[-1].removeprefix("the report is ")).exists()
    again = load(EXAMPLES / "comparison.py").main(str(tmp_path / "book.txt"), str(tmp_path / "runs"), **settings)
    assert again["runs"] == result["runs"]


def test_commands_of_a_comparison_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other and one twice, on texts that are too short, so that each ends in one line."""
    monkeypatch.chdir(tmp_path)
    for name in ("book.txt", "other.txt"):
        (tmp_path / name).write_text(TEXT)
    said = []
    for name in ("book.txt", "book.txt", "other.txt", "missing.txt"):
        monkeypatch.setattr("sys.argv", ["comparison.py", "--text", name])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(EXAMPLES / "comparison.py"), run_name="__main__")
        said.append(str(stopped.value))
    assert all(re.match(r"comparison: \d+ tokens are too few for windows of 1,024", each) for each in said[:3])
    assert said[3].startswith("comparison: missing.txt")
    assert not any("\n" in each for each in said)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["comparison-book", "comparison-other"]


@pytest.mark.slow
def test_own_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "book.txt", "--out", "data"]) == 0
    example = load(EXAMPLES / "own_position.py")
    del POSITIONS["one_slope"]  # the command line has to find it by itself
    small = ["--data", "data", "--out", "runs", "--length", "16", "--multiples", "1", "2", "--steps", "3"]
    try:
        assert main([*example.COMPARE, *example.SMALL, *small, "--batch-tokens", "64", "--test-tokens", "256"]) == 0
    finally:
        POSITIONS.pop("one_slope", None)
    out = capsys.readouterr().out
    assert re.search(r"one_slope +\d", out)
    assert Path("runs/report/report.html").exists()


# The notebook


def test_the_notebook_is_that_of_the_start_page() -> None:
    make = load(ROOT / "scripts" / "start_notebook.py")
    assert make.NOTEBOOK.read_text() == make.notebook_of(make.PAGE.read_text()), "run scripts/start_notebook.py"


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "start.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        is_code = cell["cell_type"] == "code"
        wanted = {"cell_type", "id", "metadata", "source"} | ({"outputs", "execution_count"} if is_code else set())
        assert set(cell) == wanted
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 2
    names: dict[str, object] = {}
    for number, each in enumerate(code):
        exec(compile(each, f"cell {number}", "exec"), names)
    assert "keys visited" in capsys.readouterr().out


def test_links_of_the_notebook_lead_somewhere() -> None:
    cells = json.loads((EXAMPLES / "start.ipynb").read_text())["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert targets
    for target in targets:
        assert target.startswith("https://") or (EXAMPLES / target).exists(), target
