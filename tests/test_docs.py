"""What README and docs show is true: their Python runs, their tables match the data, their links exist."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_in_the_docs_runs(block: str) -> None:
    exec(compile(block, "docs", "exec"), {})


def test_there_is_python_in_the_docs() -> None:
    assert len(BLOCKS) >= 3


def test_tables_match_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = importlib.import_module("tables")
    shown = {name for page in tables.PAGES for _, name, _ in tables.MARK.findall((ROOT / page).read_text())}
    assert {"attention_cpu", "attention_gpu", "rivals_gpu", "context_parallel"} <= shown
    for page in tables.PAGES:
        text = (ROOT / page).read_text()
        assert tables.filled(text) == text, f"{page}: run python benchmarks/tables.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


def test_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = set()
    for page in PAGES:
        commands |= set(re.findall(r"\bmake ([a-z-]+)", page.read_text()))
    for command in commands & set(re.findall(r"`?make ([a-z-]+)`?", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command


def test_no_machine_leaks_into_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if not path.is_file() or path == Path(__file__).resolve():
            continue
        text = path.read_text(errors="ignore")
        for leak in ("/work/", "/home/", "/root/", "../shared", "files.pythonhosted"):
            assert leak not in text, f"{name} mentions {leak}"
