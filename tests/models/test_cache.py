"""A cache changes nothing but the time: logits are those of the whole text, however it is cut up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trainshort as ts
from tests.models.small import (
    EVERY_POSITION,
    FOX_PRO,
    language_model,
    left_padded,
    lively,
    random_tokens,
    small_config,
)
from tests.ops.cases import windows_whatever_they_cost

CHUNKS = [[7, 128, 1, 100, 64], [128, 128, 44], [1, 1, 1, 126, 1, 1, 169], [299, 1], [130, 3, 167], [300]]
Cache = ts.KeyValueCache


def make_cache(model: ts.LanguageModel, batch: int, kind: str, total: int) -> Cache:
    """A growing cache, one that just holds the text, or a longer one that holds NaN where nothing is written."""
    if kind == "growing":
        return model.make_cache(batch)
    cache = model.make_cache(batch, total if kind == "exact" else total + 333)
    if kind == "garbage":
        for buffer in (*cache.keys, *cache.values):
            buffer.fill_(math.nan)
    return cache


def in_chunks(model: ts.LanguageModel, tokens: Tensor, chunks: list[int], cache: Cache, **first: Any) -> Tensor:
    """Logits of all tokens, computed a chunk at a time; `first` goes with the first chunk."""
    assert sum(chunks) == tokens.shape[1]
    out = []
    with torch.no_grad():
        for part in tokens.split(chunks, dim=1):
            out.append(model(part, cache=cache, **first))
            first = {}
    assert cache.length == tokens.shape[1]
    return torch.cat(out, dim=1)


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    """Both are float32 computations of one thing, on logits of size ten."""
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("kind", ["growing", "exact", "garbage"])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_logits_are_those_without_a_cache(chunks: list[int], kind: str, position: str) -> None:
    model, tokens = language_model(position), random_tokens(2, 300)
    with torch.no_grad():
        expected = model(tokens)
    assert_same_logits(in_chunks(model, tokens, chunks, make_cache(model, 2, kind, 300)), expected)


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_float64_logits_are_the_same_to_many_digits(position: str) -> None:
    model, tokens = language_model(position, dtype=torch.float64), random_tokens(2, 300)
    with torch.no_grad():
        expected = model(tokens)
    for chunks in CHUNKS:
        found = in_chunks(model, tokens, chunks, make_cache(model, 2, "garbage", 300))
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-10)


def test_modes_may_change() -> None:
    """A cache that is made, or grows, in inference mode can be written to outside of it."""
    model, tokens = language_model(), random_tokens(1, 700)
    with torch.inference_mode():
        cache = model.make_cache(1)
        model(tokens[:, :100], cache=cache)
        model(tokens[:, 100:300], cache=cache)
    with torch.no_grad():
        found = [model(part, cache=cache) for part in (tokens[:, 300:301], tokens[:, 301:])]
        assert_same_logits(torch.cat(found, dim=1), model(tokens)[:, 300:])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_way_of_cutting(data: st.DataObject) -> None:
    position = data.draw(st.sampled_from(EVERY_POSITION))
    chunks = data.draw(st.lists(st.sampled_from([1, 2, 7, 64, 127, 128, 129, 200]), min_size=1, max_size=6))
    kv_heads = data.draw(st.sampled_from([1, 2, 4]))
    kind = data.draw(st.sampled_from(["growing", "exact", "garbage"]))
    model, tokens = language_model(position, num_kv_heads=kv_heads, max_length=1200), random_tokens(1, sum(chunks))
    with torch.no_grad():
        expected = model(tokens)
    assert_same_logits(in_chunks(model, tokens, chunks, make_cache(model, 1, kind, sum(chunks))), expected)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("position", EVERY_POSITION)
def test_grouped_queries(position: str, kv_heads: int) -> None:
    model, tokens = language_model(position, num_kv_heads=kv_heads), random_tokens(2, 300)
    cache = make_cache(model, 2, "garbage", 300)
    assert cache.keys[0].shape[1] == kv_heads
    with torch.no_grad():
        assert_same_logits(in_chunks(model, tokens, [150, 1, 149], cache), model(tokens))


def test_long_texts_under_certified_windows() -> None:
    """Far enough that most heads skip most keys, both at once and a token at a time."""
    model, tokens = language_model(num_heads=8, d_model=64), random_tokens(1, 1500)
    with torch.no_grad():
        expected = model(tokens)
    found = in_chunks(model, tokens, [1490, *[1] * 10], make_cache(model, 1, "garbage", 1500))
    assert_same_logits(found, expected)


def test_long_texts_have_windows_to_use() -> None:
    """The norms kept with the cache of such a text prove that a step reads few of its keys."""
    model, tokens = language_model(num_heads=8, d_model=64), random_tokens(1, 1500)
    cache = model.make_cache(1, 1500)
    in_chunks(model, tokens, [1500], cache)
    keys = cache.keys[0][:, :, :1500]
    with windows_whatever_they_cost():
        windows = ts.certified_windows(keys[:, :, -1:], keys, key_norms=cache.norms[0])
    visited = (windows[..., 1] - windows[..., 0]).double().mean().item()
    assert visited < 9, (
        f"{visited} of 12 blocks"
    )  # heads that are computed together share the longest of their windows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    model, tokens = language_model(dtype=dtype), random_tokens(2, 300)
    cache = model.make_cache(2)
    assert cache.keys[0].dtype == dtype
    with torch.no_grad():
        expected = model(tokens).float()
    found = in_chunks(model, tokens, [150, 1, 149], cache).float()
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error.item() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_under_autocast(position: str) -> None:
    """A float32 model with a float32 cache, called where autocast turns keys into bfloat16."""
    model, tokens = language_model(position), random_tokens(2, 60)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(tokens).float()
        found = in_chunks(model, tokens, [40, 1, 19], model.make_cache(2)).float()
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error.item() < 4 * torch.finfo(torch.bfloat16).eps


# Left padding


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("kind", ["growing", "garbage"])
def test_left_padded_rows_are_those_rows_alone(kind: str, position: str) -> None:
    model = language_model(position)
    rows = [random_tokens(1, length, seed=length)[0] for length in (260, 131, 4)]
    tokens, mask = left_padded(rows, filler=3)
    cache = make_cache(model, 3, kind, 290)
    later = random_tokens(3, 30, seed=9)
    with torch.no_grad():
        first = model(tokens, cache=cache, key_padding_mask=mask)
        steps = [model(part, cache=cache) for part in later.split([1, 1, 28], dim=1)]
        found = torch.cat((first, *steps), dim=1)
        for index, row in enumerate(rows):
            whole = torch.cat((row, later[index]))[None]
            expected = model(whole)[0]
            assert_same_logits(found[index, -whole.shape[1] :], expected)


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_padding_that_spans_chunks(position: str) -> None:
    """Told to the cache in advance, padding may be longer than a chunk of the prompt."""
    model = language_model(position)
    rows = [random_tokens(1, length, seed=length)[0] for length in (250, 20)]
    tokens, mask = left_padded(rows)
    cache = model.make_cache(2)
    cache.pad_left(mask)
    found = in_chunks(model, tokens, [100, 100, 50], cache)
    with torch.no_grad():
        assert_same_logits(found[1, -20:], model(rows[1][None])[0])
        assert_same_logits(found[0], model(rows[0][None])[0])
    assert bool(torch.isfinite(found).all())


def test_what_stands_under_padding_does_not_matter() -> None:
    model = language_model()
    rows = [random_tokens(1, length, seed=length)[0] for length in (140, 9)]
    results = []
    for filler in (0, 17, 60):
        tokens, mask = left_padded(rows, filler)
        with torch.no_grad():
            results.append(model(tokens, cache=model.make_cache(2), key_padding_mask=mask)[1, -9:])
    assert_same_logits(results[1], results[0])
    assert_same_logits(results[2], results[0])


# What the cache keeps


@pytest.mark.parametrize("position", EVERY_POSITION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_bound_the_keys_of_each_block(dtype: torch.dtype, position: str) -> None:
    model, tokens = language_model(position, dtype=dtype, num_kv_heads=2), random_tokens(2, 400)
    for kind, chunks in (("growing", [7, 128, 1, 200, 64]), ("garbage", [1, 127, 1, 271]), ("exact", [400])):
        cache = make_cache(model, 2, kind, 400)
        in_chunks(model, tokens, chunks, cache)
        for keys, norms in zip(cache.keys, cache.norms, strict=True):
            assert norms.dtype == torch.float32
            assert norms.shape == (2, 2, -(-cache.capacity // 128))
            exact = keys[:, :, :400].double().norm(dim=-1)
            for block in range(4):
                largest = exact[:, :, 128 * block : 128 * (block + 1)].amax(-1)
                assert bool((norms[:, :, block] >= largest).all()), "no bound"
                assert bool((norms[:, :, block] <= largest * (1 + 2.0**-20)).all()), "a loose bound"
            assert not bool(norms[:, :, 4:].any())


def test_a_growing_cache_keeps_what_it_has() -> None:
    model, tokens = language_model(), random_tokens(1, 700)
    small, large = model.make_cache(1), model.make_cache(1, 2000)
    for cache in (small, large):
        in_chunks(model, tokens, [200, 200, 300], cache)
    assert small.capacity >= 700
    for mine, theirs in ((small.keys, large.keys), (small.values, large.values)):
        for one, two in zip(mine, theirs, strict=True):
            assert torch.equal(one[:, :, :700], two[:, :, :700])
    for one, two in zip(small.norms, large.norms, strict=True):
        assert torch.equal(one[:, :, :6], two[:, :, :6])


def test_growing_is_rare() -> None:
    """By doubling: adding tokens one at a time copies each of them a constant number of times."""
    cache = ts.KeyValueCache(small_config(), 1)
    capacities = set()
    for _ in range(5000):
        cache.reserve(1)
        cache.advance(1)
        capacities.add(cache.capacity)
    assert len(capacities) <= 7


def test_a_failed_call_leaves_the_cache_usable() -> None:
    model, tokens = language_model(), random_tokens(1, 50)
    cache = model.make_cache(1, 50)
    in_chunks(model, tokens[:, :30], [30], cache)
    bad = tokens[:, 30:].clone()
    bad[0, 0] = -1
    for wrong in (bad, random_tokens(1, 21), random_tokens(2, 5)):
        with pytest.raises(ValueError, match=r"vocabulary|do not fit|rows"):
            model(wrong, cache=cache)
    assert cache.length == 30
    with torch.no_grad():
        assert_same_logits(model(tokens[:, 30:], cache=cache), model(tokens)[:, 30:])


# Errors


def test_a_cache_that_is_too_small() -> None:
    model = language_model()
    cache = model.make_cache(1, 100)
    model(random_tokens(1, 90), cache=cache)
    with pytest.raises(ValueError, match=r"holds 100 tokens: 90 are there and 11 more do not fit"):
        model(random_tokens(1, 11), cache=cache)
    model(random_tokens(1, 10), cache=cache)
    assert cache.length == 100


def test_padding_given_late() -> None:
    model = language_model()
    cache = model.make_cache(1)
    model(random_tokens(1, 5), cache=cache)
    with pytest.raises(ValueError, match="first tokens of a cache"):
        model(random_tokens(1, 5), cache=cache, key_padding_mask=torch.ones(1, 5, dtype=torch.bool))


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]], ids=str)
def test_padding_that_is_not_on_the_left(mask: list[int]) -> None:
    model = language_model()
    with pytest.raises(ValueError, match="padded on the left"):
        model(random_tokens(1, 4), cache=model.make_cache(1), key_padding_mask=torch.tensor([mask]).bool())


def test_another_number_of_rows() -> None:
    model = language_model()
    with pytest.raises(ValueError, match="holds 2 rows, got tokens with 3"):
        model(random_tokens(3, 5), cache=model.make_cache(2))


@pytest.mark.parametrize("shape", [(2, 9), (2, 21), (3, 20), (1, 20), (20,)], ids=str)
def test_a_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    model = language_model()
    with pytest.raises(ValueError, match=r"key_padding_mask must .*\[2, 20\]"):
        model(random_tokens(2, 20), cache=model.make_cache(2), key_padding_mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_a_mask_that_is_not_bool(dtype: torch.dtype) -> None:
    """The masks of other libraries are ints: not of ones is minus two, which is no number of padding tokens."""
    model = language_model("sinusoidal")
    with pytest.raises(TypeError, match=r"key_padding_mask must be (a )?bool"):
        model(random_tokens(2, 20), cache=model.make_cache(2), key_padding_mask=torch.ones(2, 20, dtype=dtype))


@pytest.mark.parametrize(
    ("batch", "capacity", "match"), [(0, 5, "batch_size"), (1, 0, "capacity"), (1, -1, "capacity")]
)
def test_sizes_that_cannot_be(batch: int, capacity: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ts.KeyValueCache(small_config(), batch, capacity)


@pytest.mark.parametrize("options", [{"tolerance": 1e-3}, {"on_failure": "raise"}], ids=str)
def test_options_of_bounded_caches(options: dict[str, Any]) -> None:
    for make in (
        lambda: ts.KeyValueCache(small_config(), 1, **options),
        lambda: language_model().make_cache(1, **options),
    ):
        with pytest.raises(
            ValueError, match=f"{next(iter(options))} is an option of bounded caches: pass bounded=True"
        ):
            make()


def test_a_cache_is_for_causal_models() -> None:
    model = ts.Encoder(small_config(causal=False))
    with pytest.raises(ValueError, match="causal"):
        model.trunk(random_tokens(1, 5), cache=ts.KeyValueCache(model.config, 1))


@pytest.mark.parametrize("changes", [{}, {"position": "fox", **FOX_PRO}], ids=["alibi", "fox pro"])
@pytest.mark.parametrize("before", [0, 7])
@torch.no_grad()
def test_what_comes_after_a_bookmark_is_forgotten(changes: dict[str, Any], before: int) -> None:
    model = lively(ts.LanguageModel(small_config(**changes))).double().eval()
    text, other = random_tokens(1, 20), random_tokens(1, 9, seed=1)
    cache = model.make_cache(1, 40)
    if before:
        model(text[:, :before], cache=cache)
    place = cache.bookmark()
    model(other, cache=cache)
    cache.return_to(place)
    torch.testing.assert_close(model(text[:, before:], cache=cache), model(text)[:, before:])
    with pytest.raises(ValueError, match="the cache has only"):
        model.make_cache(1, 40).return_to(cache.bookmark())
