"""`trainshort report`: from anywhere, without torch, with one sentence for what is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainshort
from tests.cli.run_cli import run_cli
from tests.report.made import make_run, make_runs

Capture = pytest.CaptureFixture[str]


def test_the_command_writes_the_report_and_says_where(capsys: Capture, tmp_path: Path) -> None:
    folders = make_runs(tmp_path / "runs")
    (folders[0] / "metrics.jsonl").unlink()
    outcome = run_cli(capsys, "report", *folders, "--out", tmp_path / "out", "--no-figures", "--title", "Mine")
    assert outcome.status == 0
    assert f"{tmp_path / 'out' / 'report.html'}: 4 runs" in outcome.out
    assert "metrics.jsonl: missing" in outcome.error
    assert "<title>Mine</title>" in (tmp_path / "out" / "report.html").read_text()


def test_what_stands_beside_runs_is_no_problem(capsys: Capture, tmp_path: Path) -> None:
    make_run(tmp_path / "alibi")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokens.bin").write_bytes(b"")
    out = tmp_path / "report"
    for _ in range(2):  # the second time the report is among the paths
        paths = sorted(path for path in tmp_path.iterdir())
        outcome = run_cli(capsys, "report", *paths, "--out", out, "--no-figures")
        assert (outcome.status, outcome.error) == (0, "")
        assert "1 run," in outcome.out


def test_no_runs_is_an_error_that_writes_nothing(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for given in ("empty", "nowhere"):
        outcome = run_cli(capsys, "report", tmp_path / given, "--out", tmp_path / "out")
        assert "there is no run to report on" in outcome.one_sentence()
        assert str(tmp_path / given) in outcome.error
    assert not (tmp_path / "out").exists()


def test_a_path_that_no_system_takes_is_named(capsys: Capture, tmp_path: Path) -> None:
    make_run(tmp_path / "alibi")
    outcome = run_cli(capsys, "report", tmp_path / "alibi", "x" * 5000, "--out", tmp_path / "out", "--no-figures")
    assert outcome.status == 0
    assert "xxx: cannot be read (File name too long): left out" in outcome.error


@pytest.mark.parametrize("package", ["plotly", "matplotlib"])
def test_packages_that_are_not_there(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    make_run(tmp_path / "alibi")
    monkeypatch.setitem(sys.modules, package, None)
    outcome = run_cli(capsys, "report", tmp_path / "alibi", "--out", tmp_path / "out")
    assert f"needs the package {package}, which is not installed: pip install 'trainshort[lab]'" in outcome.error
    outcome.one_sentence()
    assert not (tmp_path / "out").exists()


def test_dots_have_limits(capsys: Capture, tmp_path: Path) -> None:
    assert "between 50 and 1200" in run_cli(capsys, "report", tmp_path, "--dots", 7).one_sentence()


def test_the_report_never_imports_torch(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    code = (
        "import sys\nfrom trainshort.cli.main import main\n"
        f"status = main(['report', {str(tmp_path / 'runs')!r}, '--out', {str(tmp_path / 'out')!r}])\n"
        "assert 'torch' not in sys.modules\nsys.exit(status)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (tmp_path / "out" / "figures" / "extrapolation.svg").exists()


def test_the_report_knows_files_and_nothing_else_of_the_library() -> None:
    folder = Path(trainshort.__file__).parent / "report"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    used = set(re.findall(r"(?:from|import) trainshort\.([\w.]+)", text))
    assert {name for name in used if not name.startswith("report")} == {
        "common.checks",
        "common.extras",
        "common.files",
        "common.machine",
        "common.reading",
    }
