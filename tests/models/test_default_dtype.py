"""Models built and used under torch.set_default_dtype, the usual way to a model in half precision."""

from __future__ import annotations

import pytest
import torch

import trainshort as ts
from tests.defaults import DEFAULTS, default_dtype
from tests.models.small import EVERY_POSITION, encoder, language_model, random_tokens, small_config


def assert_norms_bound_what_is_stored(cache: ts.KeyValueCache) -> None:
    for keys, norms in zip(cache.keys, cache.norms, strict=True):
        assert norms.dtype == torch.float32
        exact = keys[:, :, : cache.length].double().norm(dim=-1)
        for block, rows in enumerate(exact.split(128, dim=-1)):
            assert bool((norms[:, :, block] >= rows.amax(-1)).all())


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("position", EVERY_POSITION)
def test_a_model_built_under_another_default_generates(position: str, default: torch.dtype) -> None:
    tokens = random_tokens(2, 150)
    with default_dtype(default):
        model = ts.LanguageModel(small_config(position)).eval()
        assert model.trunk.embedding.weight.dtype == default
        found = model.generate(tokens, max_new_tokens=4, temperature=0.0)
        cache = model.make_cache(2)
        with torch.no_grad():
            for part in tokens.split([100, 1, 49], dim=1):
                model(part, cache=cache)
        assert_norms_bound_what_is_stored(cache)
    assert torch.equal(found, model.generate(tokens, max_new_tokens=4, temperature=0.0)), "the default changed tokens"


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("position", EVERY_POSITION)
def test_the_default_changes_nothing_about_a_model_that_is_there(position: str, default: torch.dtype) -> None:
    model, tokens = language_model(position), random_tokens(2, 300)
    targets = random_tokens(2, 300, seed=1)
    parameters = list(model.parameters())

    def results() -> list[torch.Tensor]:
        loss = model.loss(tokens, targets)
        generated = model.generate(tokens[:, :40], max_new_tokens=8, temperature=0.7, top_p=0.9, seed=3)
        return [loss, *torch.autograd.grad(loss, parameters), generated]

    expected = results()
    with default_dtype(default):
        for one, two in zip(results(), expected, strict=True):
            assert one.dtype == two.dtype
            assert torch.equal(one, two)


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
def test_the_default_changes_nothing_about_an_encoder(default: torch.dtype) -> None:
    model, tokens = encoder(position_options={"trainable": True}), random_tokens(2, 300)
    mask = torch.arange(300)[None] < torch.tensor([300, 177])[:, None]

    def results() -> list[torch.Tensor]:
        pooled = model.pool(tokens, mask)
        return [pooled, *torch.autograd.grad(pooled.square().sum(), list(model.parameters()), allow_unused=True)]

    expected = results()
    with default_dtype(default):
        for one, two in zip(results(), expected, strict=True):
            assert (one is None and two is None) or torch.equal(one, two)


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
def test_slopes_have_a_dtype_of_their_own(default: torch.dtype) -> None:
    expected = ts.alibi_slopes(4)
    with default_dtype(default):
        for options in ({}, {"trainable": True}, {"slopes": expected.tolist()}):
            bias = ts.LanguageModel(small_config(position_options=options)).position.bias()
            assert isinstance(bias, ts.LinearBias)
            assert bias.slopes.dtype == torch.float32
            torch.testing.assert_close(bias.slopes, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("capacity", [None, 400], ids=["growing", "whole"])
def test_norms_bound_keys_that_the_cache_rounds(capacity: int | None, dtype: torch.dtype) -> None:
    """Written in one piece, one by one and across a growing: what is stored may be longer than what came."""
    cache = ts.KeyValueCache(small_config(num_layers=1), 2, capacity, dtype=dtype)
    rows = torch.randn(2, 4, 400, 8, generator=torch.Generator().manual_seed(0))
    for part in rows.split([100, *[1] * 60, 240], dim=2):
        cache.reserve(part.shape[2])
        cache.append(0, part, part)
        cache.advance(part.shape[2])
        assert_norms_bound_what_is_stored(cache)
