"""A save that fails, wherever it fails, leaves the old model whole and nothing else behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

import trainshort as ts
from tests.models.saved import assert_same_model, tiny_tokenizer
from tests.models.small import encoder, language_model


class Interrupted(BaseException):
    """Like a KeyboardInterrupt: nothing catches it by accident."""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]) -> None:
    """Whoever writes that file writes half of it, and then the disk is full."""
    save_file, write_text = safetensors.torch.save_file, Path.write_text

    def half(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        raise error("no space left on device")

    def save_tensors(tensors: Any, path: Any, *arguments: Any, **options: Any) -> None:
        save_file(tensors, path, *arguments, **options)
        if name in str(path):
            half(Path(path))

    def save_text(path: Path, text: str, *arguments: Any, **options: Any) -> int:
        count = write_text(path, text, *arguments, **options)
        if name in path.name:
            half(path)
        return count

    monkeypatch.setattr(safetensors.torch, "save_file", save_tensors)
    monkeypatch.setattr(Path, "write_text", save_text)


@pytest.mark.parametrize("error", [OSError, Interrupted])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_the_old_model_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]
) -> None:
    """All of the old files are there, and no others: never the tensors of one model with the config of another."""
    old, new = language_model(seed=1), encoder(d_model=16, seed=2)
    old.tokenizer, new.tokenizer = tiny_tokenizer(), tiny_tokenizer("another one")
    ts.save(old, tmp_path)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        fail_at(patch, name, error)
        with pytest.raises(error, match="no space left"):
            ts.save(new, tmp_path)
    assert sorted(contents(tmp_path)) == sorted(before), "files left behind"
    changed = [file for file, content in contents(tmp_path).items() if content != before[file]]
    assert not changed, "files of the new model"
    assert_same_model(ts.load(tmp_path), old)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_the_tokenizer_of_the_old_model_stays_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It goes when the model is replaced by one without, and not before that has been written."""
    old = language_model(seed=1)
    old.tokenizer = tiny_tokenizer()
    ts.save(old, tmp_path)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        fail_at(patch, name, OSError)
        with pytest.raises(OSError, match="no space left"):
            ts.save(language_model(seed=2), tmp_path)
    assert contents(tmp_path) == before
    ts.save(language_model(seed=2), tmp_path)
    assert sorted(contents(tmp_path)) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_first_save_that_fails_leaves_nothing_that_looks_like_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = language_model()
    model.tokenizer = tiny_tokenizer()
    with monkeypatch.context() as patch:
        fail_at(patch, name, OSError)
        with pytest.raises(OSError, match="no space left"):
            ts.save(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_cannot_be_written(tmp_path: Path) -> None:
    """It is asked for its text before anything is replaced."""

    class Broken:
        def to_str(self) -> str:
            raise RuntimeError("broken tokenizer")

    old, new = language_model(seed=1), language_model(seed=2)
    ts.save(old, tmp_path)
    new.tokenizer = Broken()
    with pytest.raises(RuntimeError, match="broken tokenizer"):
        ts.save(new, tmp_path)
    assert_same_model(ts.load(tmp_path), old)
