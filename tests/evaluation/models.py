"""Small models and texts to evaluate."""

from __future__ import annotations

import numpy as np
import torch

import trainshort as ts


def model(position: str = "alibi", size: float = 6.0, **fields: object) -> ts.LanguageModel:
    torch.manual_seed(1)
    values = {"vocab_size": 31, "d_model": 16, "num_layers": 2, "num_heads": 4, "position": position} | fields
    made = ts.LanguageModel(ts.ModelConfig(**values))  # type: ignore[arg-type]
    with torch.no_grad():  # far from uniform, so that what is scored matters
        for parameter in made.parameters():
            parameter.mul_(size)
    return made.eval()


def text(count: int, vocab: int = 31) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab, count).astype(np.uint16)
