"""A position method in a file of the user's own, in every command: `--import`, and only that, runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.run_cli import run_cli
from tests.positions.test_imported import METHOD
from trainshort.positions import POSITIONS, imported

Capture = pytest.CaptureFixture[str]
SMALL = [
    "--length",
    "16",
    "--batch-tokens",
    "64",
    "--num-layers",
    "1",
    "--d-model",
    "16",
    "--num-heads",
    "2",
    "--device",
    "cpu",
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file, with a line for each time that it is run in ran.txt."""
    path = tmp_path / "method.py"
    mark = f"with open({str(tmp_path / 'ran.txt')!r}, 'a') as file:\n    file.write('again\\n')\n"
    path.write_text(METHOD + mark)
    monkeypatch.setattr(imported, "_files", {})
    monkeypatch.setattr(imported, "_origins", {})
    monkeypatch.setattr("trainshort.report.figures.drawn", lambda chart, dots: iter(()))  # they take seconds
    yield path
    forget()


def forget() -> None:
    """As a new process would."""
    POSITIONS.pop("halves", None)
    imported._files.clear()
    imported._origins.clear()
    for name in [name for name in sys.modules if name.startswith("trainshort_imported_")]:
        del sys.modules[name]


def test_every_command_takes_it(capsys: Capture, prepared: Path, tmp_path: Path, file: Path) -> None:
    run = tmp_path / "run"
    train = ["train", "--data", prepared, "--out", run, "--position", "halves", "--steps", 2, *SMALL]
    assert "must be one of" in run_cli(capsys, *train).one_sentence()
    assert not run.exists()
    commands = [
        [*train, "--set", "position.times=2"],
        ["train", "--out", run, "--resume"],
        ["evaluate", run, "--lengths", 16, "--tokens", 64],
        ["generate", run, "--prompt", "a", "--max-new-tokens", 2],
    ]
    for number, words in enumerate(commands):
        if number:
            error = run_cli(capsys, *words).one_sentence()
            assert "the position method 'halves' is not known here; it came from the file" in error
            assert repr(str(file)) in error
            assert "--import" in error
        outcome = run_cli(capsys, *words, "--import", file)
        assert outcome.status == 0, outcome.error
        forget()
    assert json.loads((run / "config.json").read_text())["position_origin"] == {"file": str(file)}
    for words, name in (([], "halves"), (["--import", file], "Halves &amp; more")):
        assert run_cli(capsys, "report", run, "--out", tmp_path / "report", *words).status == 0
        assert f"</svg>{name} </th>" in (tmp_path / "report" / "report.html").read_text()
    assert (tmp_path / "ran.txt").read_text().count("again") == len(commands) + 1


@pytest.mark.slow
def test_processes_of_a_comparison_import_it_too(capsys: Capture, prepared: Path, tmp_path: Path, file: Path) -> None:
    words = ["compare", "--data", prepared, "--out", tmp_path / "out", "--positions", "halves", "--seeds", 0, 1]
    words += ["--steps", 2, "--multiples", 1, "--test-tokens", 64, "--jobs", 2, *SMALL]
    outcome = run_cli(capsys, *words, "--import", file)
    assert outcome.status == 0, outcome.error
    assert "halves" in outcome.out
    assert (tmp_path / "ran.txt").read_text().count("again") == 1 + 2


def test_a_method_of_a_script_is_refused_where_processes_cannot_know_it(
    capsys: Capture, prepared: Path, tmp_path: Path, file: Path
) -> None:
    POSITIONS["halves"] = type("Halves", (POSITIONS["none"],), {})
    words = ["compare", "--data", prepared, "--out", tmp_path / "out", "--positions", "halves", "alibi", "--jobs", 2]
    error = run_cli(capsys, *words, "--test-tokens", 64, "--multiples", 1, *SMALL).one_sentence()
    assert "which other processes don't import" in error


def test_what_cannot_be_imported(capsys: Capture, tmp_path: Path, file: Path) -> None:
    words = ["report", tmp_path, "--import"]
    said = run_cli(capsys, *words, tmp_path / "nowhere.py").one_sentence()
    assert "nowhere.py: no such Python file: --import FILE.py takes one that has a position method" in said
    file.write_text("1 / 0")
    assert "ZeroDivisionError: division by zero" in run_cli(capsys, *words, file).one_sentence()


@pytest.mark.parametrize("name", ["prepare", "bench"])
def test_commands_without_models_do_not_take_it(capsys: Capture, name: str) -> None:
    assert "no flag --import" in run_cli(capsys, name, "--import", "x.py").one_sentence()


def test_the_report_stays_without_torch_if_nothing_is_imported() -> None:
    code = (
        "import sys; from trainshort.cli.report import labels; assert labels() == {} and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
