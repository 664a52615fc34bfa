"""What README and docs show is true: their Python runs, their tables match the data, their links exist."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainshort as ts

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
    assert {"headline", "attention_cpu", "attention_gpu", "rivals_gpu", "context_parallel"} <= shown
    for page in tables.PAGES:
        text = (ROOT / page).read_text()
        assert tables.filled(text) == text, f"{page}: run python benchmarks/tables.py"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as code hosts and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = (re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {heading.strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if target.startswith("https://"):
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_every_page_is_in_the_site() -> None:
    listed = re.findall(r"^[a-z-]+$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert sorted([*listed, "index"]) == sorted(page.stem for page in PAGES if page.parent.name == "docs")


def documented() -> Iterator[tuple[str, Any]]:
    """What the API page shows: public names, and the methods that it lists or takes all of."""
    for name in ts.__all__:
        if name == "__version__":
            continue
        value = getattr(ts, name)
        yield name, value
        if found := re.search(rf"autoclass:: {name}\n   :members:(.*)", API):
            own = [each for each, method in vars(value).items() if each[0] != "_" and inspect.isfunction(method)]
            for method in re.findall(r"\w+", found[1]) or own:
                yield f"{name}.{method}", getattr(value, method)


API = (ROOT / "docs" / "api.md").read_text()
DOCUMENTED = dict(documented())
ELSEWHERE = ("attention", "certified_windows", "LanguageModel.generate")  # "all other arguments as in ..."


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_names_are_documented(name: str) -> None:
    value = DOCUMENTED[name]
    text = inspect.getdoc(value)
    assert text
    assert "." in name or re.search(rf"auto\w+:: {name}$", API, re.MULTILINE), "not on the API page"
    if name == "BoundedCacheError":
        return
    assert "." in name or "\nExample:\n" in text
    if name not in ELSEWHERE:
        own = inspect.isclass(value) and "__init__" in vars(value)
        parameters = inspect.signature(value.__init__ if own else value).parameters
        for each in set(parameters) - {"self"}:
            assert re.search(rf"^    \**{each}: ", text, re.MULTILINE), f"nothing is said of {each}"
    if not inspect.isclass(value) and inspect.signature(value).return_annotation != "None" and name not in ELSEWHERE:
        assert "\nReturns:\n" in text
        assert not re.search(r"\nReturns:\n[^\n]*: ", text), "what stands before a colon would be shown as a type"


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the API page says of its examples, and a process group of one."""
    monkeypatch.chdir(tmp_path)
    q, k, v = (torch.randn(1, 8, 256, 64) for _ in range(3))
    model = ts.LanguageModel(ts.ModelConfig(d_model=64, num_layers=2, num_heads=4))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield {"torch": torch, "ts": ts, "q": q, "k": k, "v": v, "model": model, "tokens": torch.randint(256, (1, 20))}
    dist.destroy_process_group()


def test_examples_in_docstrings_run(surroundings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for name, value in DOCUMENTED.items():
        if name in ("patch", "unpatch") and importlib.util.find_spec("transformers") is None:
            continue
        runner.run(parser.get_doctest(inspect.getdoc(value) or "", surroundings, name, None, None))
    assert runner.summarize(verbose=False).failed == 0, capsys.readouterr().out


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], str]]:
    monkeypatch.syspath_prepend(ROOT / "docs" / "pictures")
    drawn: dict[str, Callable[[], str]] = importlib.import_module("draw").PICTURES
    return drawn


def test_pictures_are_those_of_the_library(pictures: dict[str, Callable[[], str]]) -> None:
    """Up to how machines round: what a picture says in words is the same, and as much is drawn."""
    assert {path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg")} == set(pictures)
    for name, draw in pictures.items():
        drawn, kept = draw(), (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
        for pattern in (r">([^<]+)</t", r"<(\w+)"):
            assert re.findall(pattern, drawn) == re.findall(pattern, kept), f"{name}: python docs/pictures/draw.py"


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
