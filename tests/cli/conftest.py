"""A small text, prepared, and small runs on it, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trainshort as ts
from trainshort.data import PrepareConfig, TokenData
from trainshort.data.prepare import prepare


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    book = folder / "book.txt"
    book.write_text("".join(f"Line {number} of a small book, {number * number} in all.\n" for number in range(400)))
    return prepare(
        PrepareConfig(sources=(str(book),), out=str(folder / "data"), validation_fraction=0.3, workers=1),
        progress=False,
    )


@pytest.fixture(scope="session")
def untrained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as far as evaluate and generate look: the model, its tokenizer and what it was trained on."""
    folder = tmp_path_factory.mktemp("runs") / "untrained"
    torch.manual_seed(0)
    model = ts.LanguageModel(ts.ModelConfig(vocab_size=257, d_model=32, num_layers=2, num_heads=4))
    model.tokenizer = TokenData(prepared).tokenizer
    ts.save(model, folder)
    from trainshort.training import RunFolder, TrainConfig

    RunFolder(folder).write_config(TrainConfig(data=str(prepared), out=str(folder), length=32, batch_tokens=1024))
    return folder
