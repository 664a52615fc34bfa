"""Bounded caches on the GPU: kernels and captured graphs give what the CPU gives, in memory that does not grow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.models.small import in_pieces, language_model, left_padded, random_tokens
from tests.models.test_bounded import STEEP, startling_model, startling_text
from trainshort.models import bounded_keys, ring_sizes
from trainshort.models.bounded import BoundedCache

WIDE: dict[str, Any] = {"d_model": 128, "num_heads": 4, **STEEP}


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_keys, "FIRST_CAPACITY", 32)
    monkeypatch.setattr(bounded_keys, "SETTLE", 96)
    for module in (bounded_keys, ring_sizes):
        monkeypatch.setattr(module, "BLOCK", 8)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_logits_are_those_of_float64(kv_heads: int) -> None:
    model, tokens = language_model(num_kv_heads=kv_heads, **WIDE), random_tokens(2, 900)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(tokens)
        budget = float((model(tokens) - expected).abs().max())
    model = model.cuda()
    cache = model.make_cache(2, bounded=True)
    found = in_pieces(model, tokens.cuda(), [300, 1, 1, 1, 7, 290] + [1] * 300, cache)
    assert isinstance(cache, BoundedCache)
    assert cache.report().evictions > 0
    assert float((found.cpu() - expected).abs().max()) <= 8.0 * budget + 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, tokens = language_model(dtype=dtype, **WIDE).cuda(), random_tokens(2, 900).cuda()
    sizes = [300, 1, 1, 1, 297] + [1] * 300
    full = in_pieces(model, tokens, sizes, model.make_cache(2))
    found = in_pieces(model, tokens, sizes, model.make_cache(2, bounded=True))
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(tokens)
    budget = float((full.double() - exact).abs().max())
    assert float((found.double() - exact).abs().max()) <= 3.0 * budget


def test_padded_rows() -> None:
    model = language_model(num_kv_heads=2, **WIDE).cuda()
    rows = [random_tokens(1, length, seed=length)[0] for length in (300, 150, 1)]
    tokens, mask = left_padded(rows)
    more = random_tokens(3, 150, seed=9)
    cache = model.make_cache(3, bounded=True)
    in_pieces(model, tokens.cuda(), [300], cache, key_padding_mask=mask.cuda())
    found = in_pieces(model, more.cuda(), [1] * 150, cache).cpu()
    with torch.no_grad():
        for row, text in enumerate(rows):
            expected = model(torch.cat((text, more[row]))[None].cuda())[0, len(text) :].cpu()
            torch.testing.assert_close(found[row], expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_generation_in_a_graph(options: dict[str, Any]) -> None:
    """Through growing, settling and evicting; the same cache without a graph gives the same tokens."""
    model = language_model(**WIDE).cuda()
    prompt = random_tokens(2, 60).cuda()
    options = {"max_new_tokens": 400, "bounded": True, **options}
    expected = model.generate(prompt, cuda_graph=False, **options)
    assert torch.equal(model.generate(prompt, cuda_graph=True, **options), expected)


def test_a_failure_in_a_graph_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A startling token that the text itself brings up, in the midst of replays."""
    from trainshort.models.sampling import Sampling

    choose = Sampling._choose

    def startle(self: Sampling, logits: Tensor) -> Tensor:
        return torch.where(logits[:, 7] > 2.0, 60, choose(self, logits) % 20)

    monkeypatch.setattr(Sampling, "_choose", startle)
    model, prompt = startling_model().cuda(), startling_text(320)[:, :300].cuda()
    caches: list[BoundedCache] = []
    make = model.make_cache

    def keep(*arguments: Any, **changes: Any) -> Any:
        cache = make(*arguments, **changes)
        if isinstance(cache, BoundedCache):
            caches.append(cache)
        return cache

    monkeypatch.setattr(model, "make_cache", keep)
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 3.0, "seed": 3, "bounded": True}
    expected = model.generate(prompt, cuda_graph=False, **options)
    assert 60 in expected[0, 301:].tolist()
    assert torch.equal(model.generate(prompt, cuda_graph=True, **options), expected)
    assert all(cache.report().reruns > 0 for cache in caches)
    columns: list[Tensor] = []
    with pytest.raises(ts.BoundedCacheError, match="evicted keys could hold more"):
        model.generate(prompt, cuda_graph=True, on_failure="raise", on_token=columns.append, **options)
    assert torch.equal(torch.stack(columns, 1), expected[:, 300 : 300 + len(columns)])
    assert len(columns) < 60


def test_memory_does_not_grow() -> None:
    model, tokens = language_model(**WIDE).cuda(), random_tokens(1, 40_000).cuda()
    cache = model.make_cache(1, bounded=True)
    held = []
    for part in tokens.split(4000, dim=1):
        in_pieces(model, part, [3990] + [1] * 10, cache)
        held.append((cache.report().nbytes, torch.cuda.memory_allocated()))
    assert held[-1][0] == held[2][0]
    assert held[-1][1] <= held[2][1] + 4 * 2**18


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gates(kv_heads: int) -> None:
    """Without graphs: logits of float64, memory that is small, and generation like a full cache's."""
    changes: dict[str, Any] = {"d_model": 128, "num_heads": 4, "num_kv_heads": kv_heads}
    model, tokens = language_model("fox", **changes), random_tokens(2, 900)
    with torch.no_grad():
        for block in model.trunk.blocks:
            block.attention.gates.logits.bias.fill_(0.0)
            block.attention.gates.logits.weight.mul_(0.3)
        expected = copy.deepcopy(model).double()(tokens)
        budget = float((model(tokens) - expected).abs().max())
    model, tokens = model.cuda(), tokens.cuda()
    cache = model.make_cache(2, bounded=True)
    found = in_pieces(model, tokens, [300, 1, 1, 1, 7, 290] + [1] * 300, cache)
    assert isinstance(cache, BoundedCache)
    assert cache.report().share_of_keys < 0.6
    assert float((found.cpu() - expected).abs().max()) <= 8.0 * budget + 1e-5
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0}
    with pytest.warns(UserWarning, match="without CUDA graphs: a bounded cache looks at gates"):
        same = model.generate(tokens[:, :300], bounded=True, **options)
    assert torch.equal(same, model.generate(tokens[:, :300], **options))
