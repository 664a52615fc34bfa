"""Norms beside the caches of transformers: never below those of the keys, whatever happens to the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts

pytest.importorskip("transformers")

import transformers

from tests.integrations.stock import FAMILIES, padded, patched_like, tokens_of
from trainshort.integrations import transformers_attention as patched_attention
from trainshort.integrations.transformers_cache import store
from trainshort.ops import attention

pytestmark = pytest.mark.transformers
HEADS, WIDTH, LENGTH = 2, 16, 12000  # so long that a step looks for its window
SLOPES = torch.full((HEADS,), 0.01)
BLOCK = 128
CONFIG = transformers.BloomConfig(hidden_size=HEADS * WIDTH, n_head=HEADS, n_layer=1)


def true_norms(keys: Tensor) -> Tensor:
    """The largest norm of each block, [B, H, blocks]."""
    lengths = keys.double().norm(dim=-1)
    return torch.nn.functional.pad(lengths, (0, -lengths.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK)).amax(-1)


def cache_of(kind: str) -> Any:
    if kind == "dynamic":
        return transformers.DynamicCache(config=CONFIG)
    return transformers.StaticCache(config=CONFIG, max_cache_len=LENGTH + 300)


def random_keys(tokens: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, HEADS, tokens, WIDTH), torch.randn(rows, HEADS, tokens, WIDTH)


def filled(kind: str) -> Any:
    """After a long prompt and two steps. Row 1 has keys that are fifty times as long, far back."""
    cache = cache_of(kind)
    k, v = random_keys(LENGTH)
    k[1, :, 100:110] *= 50
    store(cache, 0, k, v)
    for _ in range(2):
        store(cache, 0, *random_keys(1))
    return cache


def both_ways(keys: Tensor, values: Tensor, norms: Tensor, index: int, end: int, row: int) -> tuple[Tensor, Tensor]:
    """Attention of a row's last query with these norms, and to all keys. The query is of usual length, in the
    direction of the key at an index."""
    q = 4 * torch.nn.functional.normalize(keys[row, :, index : index + 1], dim=-1)[None]
    k, v, norms = keys[row, :, :end][None], values[row, :, :end][None], norms[row, :, : -(-end // BLOCK)][None]
    bias = ts.LinearBias(SLOPES)
    return attention(q, k, v, bias=bias, key_norms=norms), attention(q, k, v, bias=bias, tolerance=0.0)


def overwritten(cache: Any) -> Any:
    cache.layers[0].keys[0, :, 300] *= 80
    return cache


def exchanged(cache: Any) -> Any:
    cache.layers[0].keys = cache.layers[0].keys.flip(0).contiguous()
    return cache


def method(name: str, *arguments: Any) -> Callable[[Any], Any]:
    def call(cache: Any) -> Any:
        getattr(cache, name)(*arguments)
        return cache

    return call


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda cache: cache,
    "reordered": method("reorder_cache", torch.tensor([1, 0])),
    "one beam twice": method("reorder_cache", torch.tensor([1, 1])),
    "overwritten by hand": overwritten,
    "exchanged by hand": exchanged,
    "reset": method("reset"),
    "cropped": method("crop", -500),
    "repeated": method("batch_repeat_interleave", 2),
    "selected": method("batch_select_indices", torch.tensor([1, 1, 0])),
    "filled by another": lambda cache: (cache.update(*(10 * each for each in random_keys(5)), 0), cache)[1],
}
OF_STATIC = {"cropped", "repeated", "selected"}  # which a static cache has no methods for


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def test_a_step_after_anything(kind: str, change: str, mode: Any) -> None:
    """Queries along the longest keys: what a stale norm would leave out weighs nearly all."""
    if kind == "static" and change in OF_STATIC:
        pytest.skip("a static cache cannot do that")
    if kind == "static" and mode is torch.inference_mode and change == "overwritten by hand":
        pytest.skip("inference mode keeps no versions: nobody can see that")
    with mode():
        cache = CHANGES[change](filled(kind))
        keys = cache.layers[0].keys
        rows = 2 if keys is None else keys.shape[0]
        for tokens in (1, 3):
            found = store(cache, 0, *random_keys(tokens, rows))
            assert found.norms is not None
            assert bool((found.norms >= true_norms(found.keys)).all())
            end = int(found.start) + tokens
            longest = int(found.keys[0, 0, :end].norm(dim=-1).argmax())
            for row in range(rows):
                torch.testing.assert_close(*both_ways(found.keys, found.values, found.norms, longest, end, row))


def test_a_stale_norm_would_be_a_wrong_answer() -> None:
    """The inputs of the test above, with norms that were not reordered."""
    cache = filled("static")
    stale = store(cache, 0, *random_keys(1)).norms.clone()
    cache.reorder_cache(torch.tensor([1, 0]))
    found = store(cache, 0, *random_keys(1))
    out, expected = both_ways(found.keys, found.values, stale, 105, int(found.start) + 1, row=0)
    assert float((out - expected).abs().max()) > 0.1


def test_steps_measure_new_keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing as long as the text is measured by a step, and bounds are tight."""
    from trainshort.integrations import transformers_cache

    caches = {kind: filled(kind) for kind in ("dynamic", "static")}
    measured: list[int] = []
    above = transformers_cache.norms_above
    monkeypatch.setattr(transformers_cache, "norms_above", lambda keys: measured.append(keys.shape[2]) or above(keys))
    for cache in caches.values():
        for _ in range(200):
            found = store(cache, 0, *random_keys(1))
        true = true_norms(found.keys)
        assert bool((found.norms <= 1.0001 * true).all())
        cache.reorder_cache(torch.tensor([1, 0]))
        store(cache, 0, *random_keys(1))
    assert sorted(measured)[-3] == 1
    assert len([each for each in measured if each > 1]) == 2


def test_steps_that_wait_for_the_host_measure_nothing_in_a_short_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in one that grows long, all keys once: from there on the new ones alone."""
    from trainshort.integrations import transformers_cache

    monkeypatch.setattr(transformers_cache, "_waits_for_host", lambda keys: True)
    static, cache = filled("static"), filled("dynamic")
    monkeypatch.setattr(transformers_cache, "WORTH", 10**6)
    assert store(static, 0, *random_keys(1)).norms is None
    monkeypatch.setattr(transformers_cache, "WORTH", cache.get_seq_length() + 30)
    measured: list[int] = []
    above = transformers_cache.norms_above
    monkeypatch.setattr(transformers_cache, "norms_above", lambda keys: measured.append(keys.shape[2]) or above(keys))
    for step in range(200):
        found = store(cache, 0, *random_keys(1))
        if step < 29:
            assert found.norms is None
        else:
            assert bool((found.norms >= true_norms(found.keys)).all())
            assert bool((found.norms <= 1.0001 * true_norms(found.keys)).all())
    assert measured == [transformers_cache.WORTH] + [1] * 170


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_keys_that_are_not_finite_have_no_bound(kind: str) -> None:
    for wrong in (torch.nan, torch.inf):
        cache = filled(kind)
        k, v = random_keys(1)
        k[0, 1, 0, 5] = wrong
        store(cache, 0, k, v)
        norms = store(cache, 0, *random_keys(1)).norms
        assert bool(norms[0, 1].isinf().any())
        assert bool(norms[1].isfinite().all())


@pytest.mark.parametrize("strategy", ["greedy", "beams", "assisted", "static", "static beams"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_calls_of_a_generation(family: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of every layer gets norms, and none too small."""
    counts = {"steps": 0, "with norms": 0}

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        norms = options["key_norms"]
        if q.shape[2] == 1:
            counts["steps"] += 1
            counts["with norms"] += norms is not None
        if norms is not None:
            assert bool((norms >= true_norms(k)).all())
            assert float((norms / true_norms(k)).amax(2).amin()) < 1.0001
        return attention(q, k, v, **options)

    patched = ts.patch(FAMILIES[family]())
    monkeypatch.setattr(patched_attention, "attention", watched)
    tokens, mask = padded("left", 120)
    options: dict[str, Any] = {"num_beams": 3} if "beams" in strategy else {}
    if "static" in strategy:
        options["cache_implementation"] = "static"
    if strategy == "assisted":
        tokens = mask = None
        tokens = tokens_of(1, 120).clamp_min(1)
        patched.generation_config.pad_token_id = 61
        options["assistant_model"] = patched_like(patched)
    patched.generate(tokens, attention_mask=mask, max_new_tokens=20, do_sample=False, use_cache=True, **options)
    assert counts["steps"] > 15
    assert counts["with norms"] == counts["steps"]


def test_a_compiled_step_does_not_trust_a_cache_that_another_filled() -> None:
    """Lengths that differ from what was measured make norms infinite."""
    cache = filled("static")
    compiled = torch.compile(lambda k, v: store(cache, 0, k, v).norms.clone(), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert bool(compiled(*random_keys(1)).isfinite().all())
        cache.update(*(100 * each for each in random_keys(1)), 0)
        for _ in range(3):
            assert bool(compiled(*random_keys(1))[:, :, : LENGTH // BLOCK].isinf().all())
        assert bool(store(cache, 0, *random_keys(1)).norms.isfinite().all()), "measured anew"
