"""Models of transformers as they come, and the same weights patched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.models.public.native import FALCON, VOCABULARY, bloom, falcon, mpt
from tests.models.small import left_padded, random_tokens

FAMILIES = {
    "bloom": lambda **options: bloom(6, **options),
    "mpt": lambda **options: mpt(6, **options),
    "falcon": lambda **options: falcon(6, **FALCON["like_rw"], **options),
}
MODELS = {
    "bloom-6": lambda: bloom(6),
    "mpt-5-clipped": lambda: mpt(5, {"clip_qkv": 0.7, "softmax_scale": 0.2}),
    **{f"falcon-6-{name}": lambda options=options: falcon(6, **options) for name, options in FALCON.items()},
    "bloom-11": lambda: bloom(11),
    "mpt-8": lambda: mpt(8),
    "falcon-8": lambda: falcon(8, multi_query=False),
}


def patched_like(stock: Any) -> Any:
    return ts.patch(copy.deepcopy(stock))


def tokens_of(batch: int, length: int, seed: int = 0) -> Tensor:
    return random_tokens(batch, length, seed=seed, vocabulary=VOCABULARY)


def padded(side: str, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and a mask that is True for real ones: a row of `length` and one of a third of it."""
    tokens, mask = left_padded([tokens_of(1, part, seed=part)[0] for part in (length, length // 3)], filler=7)
    return (tokens, mask) if side == "left" else (tokens.flip(1), mask.flip(1))


def stock_logits(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """What transformers computes. A float mask keeps Falcon from rounding its positions."""
    if hasattr(model.config, "max_seq_len"):
        model.config.max_seq_len = max(64, tokens.shape[1])
    mask = torch.ones(tokens.shape) if mask is None else mask.float()
    return model(tokens, attention_mask=mask, use_cache=False).logits


def assert_same(found: Tensor, expected: Tensor, of: float = 1e-5) -> None:
    """Up to the rounding of float32 in a few layers."""
    torch.testing.assert_close(found, expected, rtol=0.0, atol=of * float(expected.abs().max()))


def refuses(error: type[Exception], *words: str) -> Any:
    """A context in which an error with all these words is raised."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{word})" for word in words))
