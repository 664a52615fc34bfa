"""Stepping: one token after another at a place that the device knows gives what the plain cache gives.

What CUDA graphs replay, run here without one: the kernels in Triton's interpreter.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.models.small import EVERY_POSITION, language_model, left_padded, random_tokens


def steps(model: ts.LanguageModel, cache: ts.KeyValueCache, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(token, cache=cache) for token in tokens.split(1, dim=1)], dim=1)


def both(model: ts.LanguageModel, prompt: Tensor, later: Tensor, **first: Any) -> tuple[Tensor, Tensor]:
    """Logits of `later` with a plain cache, and with a stepping one that holds NaN where nothing is written."""
    plain, stepping = model.make_cache(len(prompt)), model.make_cache(len(prompt), prompt.shape[1] + 200)
    for buffer in (*stepping.keys, *stepping.values):
        buffer.fill_(math.nan)
    with torch.no_grad():
        for cache in (plain, stepping):
            model(prompt, cache=cache, **first)
    stepping.begin_steps()
    found = steps(model, stepping, later)
    stepping.end_steps()
    expected = steps(model, plain, later)
    assert stepping.length == plain.length == prompt.shape[1] + later.shape[1]
    for one, two in zip(stepping.norms, plain.norms, strict=True):
        blocks = -(-plain.length // 128)
        torch.testing.assert_close(one[:, :, :blocks], two[:, :, :blocks], rtol=2.0**-20, atol=0.0)
    return found, expected


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_logits_are_those_of_a_plain_cache(position: str) -> None:
    """Across the border of a block, from where on the last block has few keys."""
    assert_same_logits(*both(language_model(position), random_tokens(2, 126), random_tokens(2, 4, seed=1)))


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_left_padded_rows(position: str) -> None:
    rows = [random_tokens(1, length, seed=length)[0] for length in (130, 40, 1)]
    prompt, mask = left_padded(rows, filler=3)
    later = random_tokens(3, 3, seed=1)
    assert_same_logits(*both(language_model(position), prompt, later, key_padding_mask=mask))


@pytest.mark.parametrize("position", ["alibi", "rotary", "t5"])
def test_grouped_queries(position: str) -> None:
    model = language_model(position, num_kv_heads=2)
    assert_same_logits(*both(model, random_tokens(2, 60), random_tokens(2, 3, seed=1)))


def test_windows_are_found_on_the_device() -> None:
    """Values far away that no head can see any more may be anything."""
    model = language_model(num_heads=2, position_options={"slopes": [0.5, 0.9]})
    prompt, later = random_tokens(1, 900), random_tokens(1, 2, seed=1)
    cache = model.make_cache(1, 1000)
    with torch.no_grad():
        expected = model(torch.cat((prompt, later), dim=1))[:, -2:]
        model(prompt, cache=cache)
    for values in cache.values:
        values[:, :, :64] = math.nan
    cache.begin_steps()
    assert_same_logits(steps(model, cache, later), expected)


def test_one_token_at_a_time() -> None:
    model = language_model()
    cache = model.make_cache(1, 50)
    cache.begin_steps()
    with pytest.raises(ValueError, match="one token at a time, got 2"):
        model(random_tokens(1, 2), cache=cache)


def test_a_cache_grows_between_steps() -> None:
    model, prompt, later = language_model(), random_tokens(1, 255), random_tokens(1, 3, seed=1)
    cache = model.make_cache(1)
    with torch.no_grad():
        expected = model(torch.cat((prompt, later), dim=1))[:, -3:]
        model(prompt, cache=cache)
    cache.begin_steps()
    assert_same_logits(steps(model, cache, later), expected)
    assert cache.capacity > 256
