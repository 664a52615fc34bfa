"""Without an extra: what works, and what the rest says."""

from __future__ import annotations

import ast
import copy
import pickle
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import trainshort as ts
from tests.cli.run_cli import run_cli
from trainshort.cli.main import COMMANDS
from trainshort.common.extras import EXTRAS, MissingExtraError, is_installed, needed, pip_command, require
from trainshort.common.progress import can_draw_bars, waiting
from trainshort.data.tokenizer import ByteTokenizer, train_bpe

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[2]
BASE = {"torch", "numpy", "safetensors"}
# triton comes with torch, where torch has it; tqdm with lm_eval.
BROUGHT = {"triton", "tqdm"}


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if only the base packages were installed."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in EXTRAS]
    for name in {*loaded, *EXTRAS}:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("shown", "inspect_shown"):
        monkeypatch.delitem(sys.modules, f"trainshort.cli.{name}", raising=False)


def project() -> dict[str, list[str]]:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {"": about["dependencies"], **about["optional-dependencies"]}
    return {extra: [re.split(r"[>=<;\[ ]", each)[0] for each in wanted] for extra, wanted in lists.items()}


def test_every_package_is_in_the_extra_that_is_named() -> None:
    lists = project()
    assert set(lists[""]) == BASE
    for package, extra in EXTRAS.items():
        assert package in lists[extra], f"{extra} does not bring {package}"
    (everything,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["all"]
    assert set(re.search(r"\[(.*)\]", everything)[1].split(",")) == set(EXTRAS.values())  # type: ignore[index]


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """The packages that a file imports, and whether it does when it is itself imported."""
    tree = ast.parse(path.read_text())
    inside = {node for part in ast.walk(tree) if isinstance(part, ast.FunctionDef) for node in ast.walk(part)}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from ((name.partition(".")[0], node not in inside) for name in names)


def test_the_table_has_every_package_that_is_imported() -> None:
    own = {"trainshort", "__future__"} | set(sys.stdlib_module_names)
    for path in sorted((ROOT / "trainshort").rglob("*.py")):
        for package, at_once in imports_of(path):
            assert package in own | BASE | BROUGHT | set(EXTRAS), f"{path} imports {package}"
            place = path.relative_to(ROOT / "trainshort").as_posix()
            if at_once and package in EXTRAS:
                assert place.startswith(("integrations/", "cli/")), f"{place} imports {package} at once"


def test_what_is_missing_is_named_with_the_command(base: None) -> None:
    with pytest.raises(MissingExtraError) as caught, needed("plotly", by="the page"):
        import plotly  # noqa: F401
    assert (
        str(caught.value)
        == "the page needs the package plotly, which is not installed: pip install 'trainshort[lab]'"
    )
    assert caught.value.name == "plotly"
    with pytest.raises(ImportError, match=r"packages rich and transformers, which are not installed: .*\[hf,lab\]'"):
        require(["rich", "torch", "transformers"], by="this")
    require(["torch"], by="this")
    assert pip_command("chess") == "pip install chess"


def test_a_package_that_is_there_and_broken_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("import a_part_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    expected = r"cannot be imported \(No module named 'a_part_that_is_not_there'\)"
    with pytest.raises(ImportError, match=expected), needed("broken_package", by="this"):
        import broken_package  # type: ignore[import-not-found]  # noqa: F401


def model(folder: Path, tokenizer: bool) -> Path:
    config = ts.ModelConfig(vocab_size=257, d_model=8, num_layers=1, num_heads=2, position="alibi")
    saved = ts.LanguageModel(config)
    saved.tokenizer = ByteTokenizer() if tokenizer else None
    ts.save(saved, folder)
    return folder


def test_models_are_loaded_and_run(base: None, tmp_path: Path) -> None:
    assert not is_installed("tokenizers")
    loaded = ts.load(model(tmp_path / "plain", tokenizer=False))
    assert loaded.tokenizer is None
    assert loaded(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 257)


def test_a_tokenizer_that_cannot_be_read_says_so_when_it_is_used(base: None, tmp_path: Path) -> None:
    folder = model(tmp_path / "model", tokenizer=True)
    loaded = ts.load(folder)
    with pytest.raises(ImportError, match=r"tokenizer\.json needs the package tokenizers, .*'trainshort\[lab\]'"):
        loaded.tokenizer.encode("text")
    assert loaded.tokenizer is not None
    ts.save(copy.deepcopy(loaded), tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert pickle.loads(pickle.dumps(loaded.tokenizer)).to_str() == loaded.tokenizer.to_str()


def test_a_bpe_needs_its_package(base: None) -> None:
    with pytest.raises(ImportError, match=r"training a BPE needs .*pip install 'trainshort\[lab\]'"):
        train_bpe(iter(["text"]), 300)


def test_patching_needs_its_package(base: None) -> None:
    with pytest.raises(ImportError, match=r"patching needs .*pip install 'trainshort\[hf\]'"):
        ts.patch(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["prepare", "book.txt", "--vocab", "300", "--out", "out"], "lab"),
        (["prepare", "table.parquet", "--out", "out"], "parquet"),
        (["evaluate", "model", "--text", "book.txt"], "lab"),
        (["inspect", "model", "--out", "out"], "lab"),
        (["report", "model", "--out", "out"], "lab"),
        (["compare", "--out", "out"], "lab"),
    ],
)
def test_commands_say_which_extra_they_need_before_any_work(
    base: None, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], extra: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "model", tokenizer=True)
    Path("book.txt").write_text("Once upon a time. " * 100)
    Path("table.parquet").write_bytes(b"PAR1")
    before = sorted(tmp_path.rglob("*"))
    outcome = run_cli(capsys, *words)
    assert f"not installed: pip install 'trainshort[{extra}]'" in outcome.one_sentence()
    assert sorted(tmp_path.rglob("*")) == before


def test_commands_that_need_no_extra_work(base: None, capsys: Capture, tmp_path: Path) -> None:
    folder = model(tmp_path / "model", tokenizer=True)
    (tmp_path / "book.txt").write_text("Once upon a time. " * 100)
    assert run_cli(capsys, "prepare", tmp_path / "book.txt", "--out", tmp_path / "data").status == 0
    assert run_cli(capsys, "bench", "--lengths", 8, "--seconds", 0.001, "--heads", 1).status == 0
    shown = run_cli(capsys, "generate", folder, "--prompt", "Once", "--max-new-tokens", 2, "--device", "cpu")
    assert shown.out.startswith("Once")
    for name in COMMANDS:
        assert run_cli(capsys, name, "--help").status == 0


def test_measuring_needs_no_package_for_tables_and_pages(base: None, capsys: Capture, tmp_path: Path) -> None:
    """As on a machine that computes, from which files are taken elsewhere to be shown."""
    folder, text = model(tmp_path / "model", tokenizer=True), tmp_path / "book.txt"
    text.write_text("Once upon a time. " * 100)
    words: list[object] = ["evaluate", folder, "--text", text, "--lengths", 64, "--device", "cpu", "--no-table"]
    assert "evaluation.json holds" in run_cli(capsys, *words).out
    assert "recall.json holds" in run_cli(capsys, *words, "--task", "recall", "--trials", 2).out
    out = tmp_path / "seen"
    shown = run_cli(capsys, "inspect", folder, "--text", text, "--tokens", 64, "--no-page", "--out", out)
    assert shown.out == f"{out / 'inspection.json'} holds what was found\n"
    assert [path.name for path in out.iterdir()] == ["inspection.json"]


def test_a_terminal_without_rich_gets_lines(base: None, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert not can_draw_bars()
    with waiting("drawing"):
        pass
    assert capsys.readouterr().err == "drawing ...\n"
