"""Folders from strangers on the command line: one line that says what is wrong, and no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run_cli import run_cli
from trainshort.common.files import sha256

Capture = pytest.CaptureFixture[str]
Change = Callable[[dict[str, Any]], Any]


def change(path: Path, by: Change) -> None:
    values = json.loads(path.read_text())
    by(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("name", "by", "said"),
    [
        ("meta.json", lambda values: values.update(dtype="O"), "dtype has to be one of uint16, uint32, got 'O'"),
        ("meta.json", lambda values: values.pop("splits"), "splits is missing"),
        ("meta.json", lambda values: values["hashes"].update({"/dev/zero": "0" * 64}), "hashes: has to be those of"),
        ("tokenizer.json", lambda values: values["model"]["vocab"].update(a=4 * 10**8), "the number 400,000,000"),
    ],
)
def test_train_on_data(capsys: Capture, prepared: Path, tmp_path: Path, name: str, by: Change, said: str) -> None:
    shutil.copytree(prepared, tmp_path / "data")
    change(tmp_path / "data" / name, by)
    if name == "tokenizer.json":  # so that the sha256 is not what is wrong
        digest = sha256(tmp_path / "data" / name)
        change(tmp_path / "data" / "meta.json", lambda values: values["hashes"].update({name: digest}))
    words = (
        "--data",
        tmp_path / "data",
        "--out",
        tmp_path / "run",
        "--length",
        16,
        "--batch-tokens",
        32,
        "--steps",
        1,
    )
    outcome = run_cli(capsys, "train", *words)
    assert said in outcome.one_sentence()
    assert not (tmp_path / "run").exists(), "nothing is left of a run that never began"


@pytest.mark.parametrize(
    ("name", "by", "said"),
    [
        ("config.json", lambda values: values["model"].update(d_model=2**20, num_heads=1), "the config wants"),
        ("config.json", lambda values: values["model"].update(num_layers=10**9), "too few for the 1,000,000,000"),
        ("config.json", lambda values: values.pop("model"), "model, the shape of the model, is missing"),
        ("tokenizer.json", lambda values: values.update(model=3), "not a tokenizer of the package tokenizers"),
    ],
)
def test_generate_from_a_model(
    capsys: Capture, untrained: Path, tmp_path: Path, name: str, by: Change, said: str
) -> None:
    shutil.copytree(untrained, tmp_path / "run")
    change(tmp_path / "run" / name, by)
    outcome = run_cli(capsys, "generate", tmp_path / "run", "--prompt", "a", "--max-new-tokens", 1)
    assert said in outcome.one_sentence()


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "3", "\ud800", ""])
def test_a_config_that_is_no_object(capsys: Capture, untrained: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(untrained, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(text, errors="surrogatepass")
    assert "config.json" in run_cli(capsys, "generate", tmp_path / "run", "--prompt", "a").one_sentence()


@pytest.mark.parametrize("dropped", ["files", "step", "config", "data", "seconds", "environment"])
def test_going_on_without_an_entry(capsys: Capture, prepared: Path, tmp_path: Path, dropped: str) -> None:
    """An error that is only the name of the entry tells nobody anything."""
    words = ("--data", prepared, "--out", tmp_path / "run", "--length", 16, "--batch-tokens", 32, "--steps", 1)
    small = ("--num-layers", 1, "--d-model", 16, "--num-heads", 2, "--eval-tokens", 0)
    assert run_cli(capsys, "train", *words, *small).status == 0
    change(tmp_path / "run" / "state" / "state.json", lambda values: values.pop(dropped))
    outcome = run_cli(capsys, "train", "--out", tmp_path / "run", "--resume")
    assert f"state.json: {dropped} is missing; restore it from a copy" in outcome.one_sentence()
