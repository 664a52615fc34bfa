"""A bounded cache loses no more than its tolerance, in memory that does not grow; where it might, it runs again."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import trainshort as ts
from tests.models.small import VOCABULARY, in_pieces, language_model, left_padded, random_tokens, small_config
from trainshort.models import bounded_keys, generate, ring_sizes
from trainshort.models.bounded import BoundedCache
from trainshort.ops.threads import one_thread

SLOPES = [1.0, 0.5, 0.3, 0.2]
STEEP: dict[str, Any] = {"position_options": {"slopes": SLOPES}}


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caches settle after 96 tokens instead of 1024, in one thread: there is little to do in each step."""
    monkeypatch.setattr(bounded_keys, "FIRST_CAPACITY", 32)
    monkeypatch.setattr(bounded_keys, "SETTLE", 96)
    for module in (bounded_keys, ring_sizes):
        monkeypatch.setattr(module, "BLOCK", 8)
    with one_thread():
        yield


def bounded_cache(model: ts.LanguageModel, batch: int, **options: Any) -> BoundedCache:
    cache = model.make_cache(batch, bounded=True, **options)
    assert isinstance(cache, BoundedCache)
    return cache


# Attention itself: queries, keys and values are given, and the lost mass is known exactly.

LAYERS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 8


class Given:
    """Queries [L, B, H, T, D], keys and values [L, B, Hkv, T, D] of a text, and dense attention over all of it."""

    def __init__(self, length: int, *, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length, self.batch, self.dtype, self.scale = length, batch, dtype, WIDTH**-0.5
        self.slopes = torch.tensor(SLOPES)
        self.q, self.k, self.v = (
            torch.randn((LAYERS, batch, heads, length, WIDTH), generator=generator, dtype=torch.float64).to(dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )

    def cache(self, **options: Any) -> BoundedCache:
        config = ts.ModelConfig(d_model=HEADS * WIDTH, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS)
        cache = ts.KeyValueCache(config, self.batch, bounded=True, dtype=self.dtype, **options)
        assert isinstance(cache, BoundedCache)
        return cache

    def attend(self, cache: BoundedCache, sizes: list[int], start: int = 0) -> Tensor:
        """Outputs [L, B, H, T, D] of the next tokens."""
        pieces, bias = [], ts.LinearBias(self.slopes)
        for size in sizes:
            part = slice(start, start + size)
            cache.reserve(size)
            pieces.append(
                torch.stack(
                    [
                        cache.attend(
                            layer,
                            self.q[layer, :, :, part],
                            self.k[layer, :, :, part],
                            self.v[layer, :, :, part],
                            bias=bias,
                            scale=self.scale,
                        )
                        for layer in range(LAYERS)
                    ]
                )
            )
            cache.advance(size)
            start += size
        return torch.cat(pieces, dim=3)

    def is_refused(self, cache: BoundedCache, sizes: list[int]) -> bool:
        """Whether a certificate fails in pieces of these sizes, or after them."""
        try:
            self.attend(cache, sizes)
            self.attend(cache, [100], start=0)  # whatever comes next
        except ts.BoundedCacheError:
            return True
        return cache.failed()

    def weights(self) -> Tensor:
        """True softmax weights in float64, [L, B, H, T, T]."""
        k = self.k.double().repeat_interleave(HEADS // KV_HEADS, 2)
        distance = torch.arange(self.length)[:, None] - torch.arange(self.length)
        scores = self.q.double() @ k.transpose(-1, -2) * WIDTH**-0.5 - self.slopes.double()[:, None, None] * distance
        return scores.masked_fill(distance < 0, -math.inf).softmax(-1)

    def dense(self) -> Tensor:
        return self.weights() @ self.v.double().repeat_interleave(HEADS // KV_HEADS, 2)

    def diameter(self) -> float:
        values = self.v.double().flatten(0, 2)
        return float(torch.cdist(values, values).amax())


ANY_SIZES = st.lists(st.sampled_from([1, 1, 1, 2, 5, 33, 100, 150]), min_size=1, max_size=40)


@settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=ANY_SIZES,
    tolerance=st.sampled_from([0.3, 1e-3, 1e-9]),
    query_size=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    common=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 50),
)
def test_outputs_are_within_the_bound(
    sizes: list[int], tolerance: float, query_size: float, common: float, seed: int
) -> None:
    """Unless the cache says that a certificate failed. Keys have a part in common, as those of trained models do."""
    text = Given(sum(sizes), seed=seed)
    text.q *= query_size
    text.k += common
    cache = text.cache(tolerance=tolerance)
    found = text.attend(cache, sizes)
    error = torch.linalg.vector_norm(found - text.dense(), dim=-1).amax()
    if not cache.failed():
        assert float(error) <= tolerance * text.diameter() + 1e-12


def test_what_is_evicted_is_what_the_certificate_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries along their keys make Cauchy-Schwarz an equation: the certificate claims what is lost, little more."""
    monkeypatch.setattr(bounded_keys, "_center", lambda keys, real: keys.new_zeros(keys[:, :, 0].shape))
    tolerance, text = 0.05, Given(700, batch=1)
    text.k[:] = 0.0
    text.k[..., 0] = 0.5 * torch.arange(700).remainder(2) + 0.5  # lengths 0.5 and 1, all along the first axis
    text.q[:] = 0.0
    text.q[..., 0] = WIDTH**0.5  # x = 1
    cache = text.cache(tolerance=tolerance)
    text.attend(cache, [200] + [1] * 500)
    assert not cache.failed()
    weights = text.weights()
    for layer, rings in enumerate(cache.held.rings):
        for head in range(HEADS):
            lost = 0.0
            for last in (698, 699):  # after a short key and after a long one
                low = max(0, last + 1 - rings.capacities[head // 2])
                gone = float(weights[layer, 0, head, last, :low].sum())
                lost = max(lost, gone / (1.0 - gone))
            claimed = tolerance / 2 * math.exp(float(cache.held.excess[layer, 0, head]))
            assert lost <= claimed <= 1.02 * lost


@pytest.mark.parametrize("common", [0.0, 3.0])
def test_the_excess_is_that_of_the_proof(common: float) -> None:
    """Of every call: what evicted keys could weigh by their norms, against what the others do, both in float64."""
    tolerance, text = 0.1, Given(420, batch=1, seed=3)
    text.k = text.k / torch.linalg.vector_norm(text.k, dim=-1, keepdim=True) + common  # norms alike: chords are tight
    cache, start, seen = text.cache(tolerance=tolerance), 0, 0
    for size in [110, 1, 1, 40, 60] + [1] * 88 + [120]:
        held = cache.held
        rings = None if held is None else list(held.rings)
        text.attend(cache, [size], start=start)
        held = cache.held
        assert held is not None
        center = held.center[:, 0].clone()
        for layer in range(LAYERS):
            for head in range(HEADS):
                run = next(run for run in (rings or held.rings)[layer].runs if head // 2 < run.heads.stop)
                low = run.low(start + (1 if size == 1 else 0)) if rings is not None else 0
                expected = largest_excess(
                    text, layer, head, range(start, start + size), low, center[layer, head // 2]
                )
                found = float(held.excess[layer, 0, head]) + math.log(tolerance / 2)
                if low == 0:
                    assert found == -math.inf
                else:
                    seen += 1
                    assert expected - 1e-9 <= found <= expected + 0.05
        held.excess.fill_(-math.inf)
        start += size
    assert seen > 400


def largest_excess(text: Given, layer: int, head: int, queries: range, low: int, center: Tensor) -> float:
    """Over these queries, of evicted keys, those before `low`, by their norms, over all others."""
    k = text.k[layer, 0, head // 2] - center
    worst = -math.inf
    for p in queries:
        q, distance = text.q[layer, 0, head, p], p - torch.arange(p + 1)
        bias = -float(text.slopes[head]) * distance
        bound = torch.linalg.vector_norm(q) * text.scale * torch.linalg.vector_norm(k[:low], dim=-1) + bias[:low]
        scores = (k[: p + 1] @ q) * text.scale + bias
        worst = max(worst, float(torch.logsumexp(bound, 0) - torch.logsumexp(scores[low:], 0)))
    return worst


def test_float32_and_half_are_within_the_bound_and_rounding() -> None:
    for dtype, rounding in ((torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        text = Given(400, dtype=dtype)
        cache = text.cache(tolerance=1e-4)
        found = text.attend(cache, [150, 1, 1, 1, 120] + [1] * 127)
        assert not cache.failed()
        assert cache.report().evictions > 0
        assert float((found.double() - text.dense()).abs().amax()) <= rounding


def test_a_query_that_turns_long_is_noticed() -> None:
    """After many short queries, one that looks for a key that is long gone."""
    text = Given(600)
    text.q *= 0.1
    text.q[:, :, :, 599] = 400.0 * text.k[:, :, :, 5].repeat_interleave(2, 2)
    cache = text.cache(tolerance=1e-3)
    text.attend(cache, [200] + [1] * 399)
    assert not cache.failed()
    text.attend(cache, [1], start=599)
    assert cache.failed()
    error = (
        (Given.dense(text)[..., 599, :] - text.attend(text.cache(tolerance=1e-3), [600])[..., 599, :]).abs().amax()
    )
    assert float(error) <= 1e-3 * text.diameter()


def test_keys_that_grow_faster_than_slopes_fade_are_noticed_or_harmless() -> None:
    text = Given(500, batch=1)
    text.k[:, :, :, :200] *= torch.linspace(1.0, 60.0, 200)[:, None].flip(0)  # the first keys are the longest
    for sizes in ([500], [100] * 5, [150] + [1] * 350):
        cache = text.cache(tolerance=1e-2)
        found = text.attend(cache, sizes)
        if not cache.failed():
            error = torch.linalg.vector_norm(found - text.dense(), dim=-1).amax()
            assert float(error) <= 1e-2 * text.diameter()


def test_keys_are_measured_anew_when_a_centre_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those in rings that keep their size: a key of length 0 may be far from the centre of the others."""
    for choice in ("at_first", "later"):
        monkeypatch.setattr(ring_sizes.RingSizes, choice, lambda *_: [bounded_keys.SETTLE] * KV_HEADS)
    text, settled = Given(192), bounded_keys.SETTLE
    text.slopes = torch.full((HEADS,), 0.5)
    text.q *= 0.0
    text.q[..., [10, 191], 0] = -1.5 * WIDTH**0.5  # x = 1.5
    text.k *= 0.0
    text.k[..., :86, 0] = 3.0  # so much the centre, and keys 86 to 95 are 0
    text.k[..., settled:, 0] = 31.0  # where the last query does not look
    cache = text.cache(tolerance=0.02)
    text.attend(cache, [90] + [1] * 102)
    assert cache.held.capacity_of.unique().tolist() == [settled]
    assert float(text.weights()[..., 191, :settled].sum(-1).amin()) > 0.1  # of keys that are evicted
    assert cache.failed()


@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_are_never_certified(bad: float, where: str) -> None:
    for sizes in ([300, 100], [300] + [1] * 100, [400]):
        text = Given(400)
        getattr(text, where)[1, 0, 1, 250] = bad
        cache = text.cache(tolerance=1e-3)
        assert text.is_refused(cache, sizes)


def test_scores_beyond_float32_are_never_certified() -> None:
    """Norms are finite, but their product is not."""
    text = Given(300, dtype=torch.float32)
    text.scale = 1e-10
    cache = text.cache(tolerance=1e-3)
    text.attend(cache, [299])
    text.q[:, :, :, 299] = text.k[:, :, :, 299].repeat_interleave(2, 2) * 1e12
    text.scale = 1e30
    text.attend(cache, [1], start=299)
    assert cache.failed()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_rounding_that_settings_allow_is_paid_for(dtype: torch.dtype) -> None:
    text = Given(300, dtype=dtype)
    matmul = torch.backends.mkldnn.matmul
    before, excess = matmul.fp32_precision, []
    for precision in ("ieee", "bf16"):
        matmul.fp32_precision = precision
        cache = text.cache(tolerance=1e-3)
        try:
            text.attend(cache, [200] + [1] * 100)
        finally:
            matmul.fp32_precision = before
        excess.append(cache.held.excess)
    assert bool((excess[1] > excess[0] + 0.01).all())


# Whole models.


@settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sizes=ANY_SIZES, kv_heads=st.sampled_from([1, 2, 4]))
def test_any_way_of_feeding(sizes: list[int], kv_heads: int) -> None:
    model, tokens = language_model(num_kv_heads=kv_heads, **STEEP), random_tokens(2, sum(sizes))
    with torch.no_grad():
        expected = model(tokens)
    cache = bounded_cache(model, 2)
    found = in_pieces(model, tokens, sizes, cache)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-4)
    assert cache.length == sum(sizes)
    assert not cache.failed()


def trained_model() -> ts.LanguageModel:
    """Has learned to look at the token before the last, in a few hundred steps."""
    torch.manual_seed(0)
    model = ts.LanguageModel(small_config(**STEEP))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(300):
        tokens = two_counters(8, 64, seed=step)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5  # of 4.1 without learning
    return model.eval()


def two_counters(batch: int, length: int, seed: int) -> Tensor:
    """Two numbers that count up in turn: each token is one more than the token before the last."""
    first, steps = random_tokens(batch, 2, seed=seed), torch.arange(length)
    return (first[:, steps % 2] + steps // 2) % VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random weights", "trained"])
def test_teacher_forcing_over_many_tokens(kind: str) -> None:
    """Differences of logits from tolerance 0 are those of rounding, and memory stays where it is."""
    model = trained_model() if kind == "trained" else language_model(**STEEP)
    tokens = two_counters(1, 6000, seed=1) if kind == "trained" else random_tokens(1, 6000)
    sizes = [500] + [250] * 10 + [1] * 1000 + [500] * 4
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        expected = exact(tokens)
    full = in_pieces(model, tokens, sizes, model.make_cache(1))
    cache = bounded_cache(model, 1)
    found = in_pieces(model, tokens, sizes, cache)
    budget = float((full - expected).abs().amax())
    error = float((found - expected).abs().amax())
    print(f"{kind}: logits off by {error:.2e}, a full cache by {budget:.2e}; {cache.report()}")
    assert error <= 3.0 * budget + 1e-6
    assert cache.report().share_of_keys < 0.1


@pytest.mark.slow
def test_memory_does_not_grow() -> None:
    model, tokens = language_model(**STEEP), random_tokens(1, 12_000)
    cache = bounded_cache(model, 1)
    held = []
    for part in tokens.split(1000, dim=1):
        in_pieces(model, part, [900] + [1] * 100, cache)
        held.append(cache.report())
    assert held[-1].nbytes == held[3].nbytes
    assert held[-1].keys_held == held[3].keys_held
    assert held[-1].nbytes < held[-1].full_bytes / 20
    assert held[-1].evictions == 12_000 * 8 - held[-1].keys_held
    assert held[-1].text_bytes >= 4 * 12_000
    assert held[-1].reruns == 0


STARTLING, USUAL = 60, 20  # a token, and how many others there are in these texts


def startling_model() -> ts.LanguageModel:
    """One token's queries in the first layer are many times as long as those of the usual tokens, which stay as they
    were: the weights change along a direction that is orthogonal to all of these."""
    model = language_model(**STEEP)
    block = model.trunk.blocks[0]
    with torch.no_grad():
        normed = block.attention_norm(model.trunk.embedding.weight)
        basis = torch.linalg.qr(normed[:USUAL].T).Q
        direction = normed[STARTLING] - basis @ (basis.T @ normed[STARTLING])
        direction = direction / (direction @ normed[STARTLING])
        block.attention.qkv.weight[:32] += 100.0 * torch.ones(32)[:, None] * direction
    return model


def startling_text(length: int) -> Tensor:
    tokens = random_tokens(1, length, vocabulary=USUAL)
    tokens[0, -20] = STARTLING
    return tokens


@pytest.mark.parametrize("sizes", [[500, 100], [400] + [1] * 200, [580] + [1] * 20], ids=len)
def test_a_hostile_token_makes_the_text_run_again(sizes: list[int]) -> None:
    model, tokens = startling_model(), startling_text(600)
    with torch.no_grad():
        expected = model(tokens)
    cache = bounded_cache(model, 1, tolerance=1e-4)
    found = in_pieces(model, tokens, sizes, cache)
    report = cache.report()
    assert report.reruns > 0
    assert cache.length == report.tokens == 600
    assert not cache.failed()
    fresh = bounded_cache(model, 1, tolerance=1e-4)
    again = in_pieces(model, tokens, [600], fresh)
    torch.testing.assert_close(found[:, -20:], expected[:, -20:], rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(found[:, -20:], again[:, -20:], rtol=1e-3, atol=1e-2)


def test_it_raises_if_told_to_and_recovers() -> None:
    model, tokens = startling_model(), startling_text(600)
    cache = bounded_cache(model, 1, tolerance=1e-4, on_failure="raise")
    in_pieces(model, tokens[:, :500], [500], cache)
    with pytest.raises(ts.BoundedCacheError, match="after 500 tokens evicted keys could hold more"):
        in_pieces(model, tokens[:, 500:], [100], cache)
    assert cache.length == 500
    found = in_pieces(model, tokens[:, 500:], [100], cache)  # the text runs again, with more memory
    with torch.no_grad():
        expected = model(tokens)[:, 500:]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)


def test_a_call_that_was_left_halfway_is_made_up_for() -> None:
    model, tokens = language_model(**STEEP), random_tokens(1, 400)
    cache = bounded_cache(model, 1)
    in_pieces(model, tokens[:, :300], [300], cache)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for sizes in ([100], [1]):  # the second time while the text runs again
        handle = model.trunk.blocks[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            in_pieces(model, tokens[:, 300 : 300 + sum(sizes)], sizes, cache)
        handle.remove()
        assert cache.length == cache.report().tokens == 300
    found = in_pieces(model, tokens[:, cache.length :], [50, 50], cache)
    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens)[:, 300:], rtol=2e-5, atol=2e-4)


def test_a_step_that_was_left_halfway_is_made_up_for() -> None:
    """In one that is checked later, too: the key that it has overwritten in the first layer is nowhere else."""
    model, tokens = language_model(**STEEP), random_tokens(1, 400)
    cache = bounded_cache(model, 1)
    in_pieces(model, tokens[:, :300], [300], cache)
    cache.begin_steps()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.trunk.blocks[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        in_pieces(model, tokens[:, 300:301], [1], cache)
    handle.remove()
    cache.end_steps()
    with pytest.raises(RuntimeError, match="feed a token, then begin steps"):
        cache.begin_steps()
    found = in_pieces(model, tokens[:, 300:], [1] * 100, cache)
    assert cache.report().reruns == 1
    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens)[:, 300:], rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("count", [0, 2])
def test_steps_are_of_one_token(count: int) -> None:
    """And a call with others changes nothing."""
    model, tokens = language_model(**STEEP), random_tokens(1, 400)
    cache = bounded_cache(model, 1)
    in_pieces(model, tokens[:, :300], [300], cache)
    cache.begin_steps()
    with pytest.raises(ValueError, match=f"takes one token at a time, got {count}: call end_steps first"):
        in_pieces(model, tokens[:, :count], [count], cache)
    found = in_pieces(model, tokens[:, 300:], [1] * 100, cache)
    cache.end_steps()
    assert cache.report().reruns == 0
    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens)[:, 300:], rtol=2e-5, atol=2e-4)


def test_bookmarks_are_for_full_caches() -> None:
    model, tokens = language_model(**STEEP), random_tokens(1, 400)
    full, cache = model.make_cache(1), bounded_cache(model, 1)
    for each in (full, cache):
        in_pieces(model, tokens[:, :300], [300], each)
    for call in (cache.bookmark, lambda: cache.return_to(full.bookmark())):
        with pytest.raises(TypeError, match="forgotten what a bookmark would return to"):
            call()
    assert cache.length == 300


def test_going_back() -> None:
    model, tokens = language_model(**STEEP), random_tokens(1, 400)
    cache = bounded_cache(model, 1)
    in_pieces(model, tokens[:, :300], [300], cache)
    cache.rollback(100)
    report = cache.report()
    assert cache.length == report.tokens == 200
    assert report.keys_held == report.evictions == 0
    found = in_pieces(model, tokens[:, 200:], [200], cache)
    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens)[:, 200:], rtol=2e-5, atol=2e-4)
    cache.rollback(400)
    mask = torch.ones((1, 20), dtype=torch.bool)
    in_pieces(model, tokens[:, :20], [20], cache, key_padding_mask=mask)  # a text of its own
    assert cache.length == 20


def test_modes_may_change() -> None:
    model, tokens = language_model(**STEEP), random_tokens(1, 400)
    with torch.inference_mode():
        cache = bounded_cache(model, 1)
        model(tokens[:, :50], cache=cache)
    found = in_pieces(model, tokens[:, 50:], [150] + [1] * 200, cache)
    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens)[:, 50:], rtol=2e-5, atol=2e-4)


def test_long_queries_before_anything_is_evicted_need_no_certificate() -> None:
    text = Given(40, dtype=torch.float32)
    text.q, text.k = text.q * 1e16, text.k * 1e16  # their products are not small beside the logarithm of nothing
    cache = text.cache()
    text.attend(cache, [30] + [1] * 10)
    assert not cache.failed()


@pytest.mark.parametrize("slope", [0.0, -0.1, math.nan])
def test_slopes_without_a_certificate_are_refused(slope: float) -> None:
    text = Given(10)
    text.slopes[1] = slope
    with pytest.raises(ValueError, match=r"slopes must be positive|head of slope 0"):
        text.attend(text.cache(tolerance=1e-3), [10])


def test_steps_can_be_checked_later() -> None:
    """As captured graphs do: a few steps, then a look at the flag, and back where it is up."""
    model, tokens = startling_model(), startling_text(600)
    cache = bounded_cache(model, 1, tolerance=1e-4)
    in_pieces(model, tokens[:, :568], [568], cache)
    cache.begin_steps()
    for first in range(568, 600, 8):
        cache.reserve(8)
        in_pieces(model, tokens[:, first : first + 8], [1] * 8, cache)
        if not cache.heed(float(cache.failure_flag())):
            break
    assert first == 576
    assert cache.length == 584
    cache.rollback(8)
    found = in_pieces(model, tokens[:, 576:], [1] * 24, cache)
    assert cache.length == 600
    assert cache.report().reruns > 0
    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens)[:, 576:], rtol=1e-3, atol=1e-2)


def test_going_back_raises_if_told_to() -> None:
    """Where a certificate failed. The end of steps does not: it may come long after all tokens that anybody wants."""
    model, tokens = startling_model(), startling_text(600)
    cache = bounded_cache(model, 1, tolerance=1e-4, on_failure="raise")
    in_pieces(model, tokens[:, :568], [568], cache)
    cache.rollback(4)
    in_pieces(model, tokens[:, 564:576], [12], cache)
    cache.begin_steps()
    cache.reserve(8)
    in_pieces(model, tokens[:, 576:584], [1] * 8, cache)
    other = copy.deepcopy(cache)
    other.end_steps()
    with pytest.raises(ts.BoundedCacheError, match="after 576 tokens evicted keys could hold more"):
        cache.rollback(8)
    assert cache.length == 576
    with torch.no_grad():
        expected = model(tokens)
    for each, start in ((cache, 576), (other, 584)):
        found = in_pieces(model, tokens[:, start:], [600 - start], each)
        torch.testing.assert_close(found, expected[:, start:], rtol=1e-3, atol=1e-2)


@pytest.mark.slow
def test_rings_grow_before_certificates_fail() -> None:
    """Queries that slowly get longer: no rerun, and no failure."""
    text = Given(3000, batch=1)
    text.q *= torch.linspace(0.5, 3.0, 3000)[:, None]
    cache = text.cache(tolerance=1e-3)
    text.attend(cache, [200])
    before = cache.report().capacities
    text.attend(cache, [1] * 2800, start=200)
    assert not cache.failed()
    after = cache.report().capacities
    assert all(
        new > old for news, olds in zip(after, before, strict=True) for new, old in zip(news, olds, strict=True)
    )


def test_close_certificates_enlarge_rings_once() -> None:
    """Rings grow by a quarter where a certificate holds by little, and not again before that could show."""
    text = Given(1500, batch=1)
    cache = text.cache(tolerance=1e-3)
    text.attend(cache, [200] + [1] * 200)
    before = cache.report().capacities
    for _ in range(4):
        cache.held.excess.fill_(-0.5)
        text.attend(cache, [1] * 2, start=400)
        cache.held.adapt(cache.length)
    after = cache.report().capacities
    growth = [
        new / old for news, olds in zip(after, before, strict=True) for new, old in zip(news, olds, strict=True)
    ]
    assert min(growth) > 1.0
    assert max(growth) < 1.6


def test_left_padding() -> None:
    model = language_model(num_kv_heads=2, **STEEP)
    rows = [random_tokens(1, length, seed=length)[0] for length in (300, 150, 20, 1)]
    tokens, mask = left_padded(rows)
    more = random_tokens(4, 200, seed=9)
    cache = bounded_cache(model, 4)
    first = in_pieces(model, tokens, [300], cache, key_padding_mask=mask)
    found = in_pieces(model, more, [1] * 60 + [80] + [1] * 60, cache)
    report = cache.report()
    assert report.keys_held + report.evictions == (300 + 150 + 20 + 1 + 4 * 200) * 2 * 2
    with torch.no_grad():
        for row, text in enumerate(rows):
            expected = model(torch.cat((text, more[row]))[None])[0]
            torch.testing.assert_close(first[row, 300 - len(text) :], expected[: len(text)], rtol=2e-5, atol=2e-4)
            torch.testing.assert_close(found[row], expected[len(text) :], rtol=2e-5, atol=2e-4)


def test_generation_is_the_same() -> None:
    model = language_model(**STEEP)
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"max_new_tokens": 300, "temperature": temperature, "seed": 3}
        tokens = random_tokens(2, 50)
        assert torch.equal(model.generate(tokens, bounded=True, **options), model.generate(tokens, **options))
    tokens, mask = left_padded([random_tokens(1, length)[0] for length in (30, 12)])
    options = {"max_new_tokens": 150, "temperature": 0.0, "key_padding_mask": mask}
    assert torch.equal(model.generate(tokens, bounded=True, **options), model.generate(tokens, **options))


def test_generation_through_a_rerun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PREFILL", 500)  # the token that startles comes in the second piece
    model, tokens = startling_model(), startling_text(600)[:, :581]
    options: dict[str, Any] = {"max_new_tokens": 10, "temperature": 0.0}
    assert torch.equal(model.generate(tokens, bounded=True, **options), model.generate(tokens, **options))
    with pytest.raises(ts.BoundedCacheError, match="after 500 tokens evicted keys could hold more"):
        model.generate(tokens, bounded=True, on_failure="raise", **options)


def test_trainable_slopes_and_changes_of_them() -> None:
    model, tokens = language_model(position_options={"trainable": True}), random_tokens(1, 300)
    cache = bounded_cache(model, 1, tolerance=1e-3)
    found = in_pieces(model, tokens, [200] + [1] * 100, cache)
    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens), rtol=1e-2, atol=1e-1)
        model.position.get_parameter("log_slopes").add_(0.1)
        with pytest.raises(ValueError, match="slopes changed"):
            model(tokens, cache=cache)


def test_what_is_refused() -> None:
    def make(**options: Any) -> Any:
        config = options.pop("config", small_config())
        return ts.KeyValueCache(config, 1, bounded=True, **options)

    with pytest.raises(ValueError, match=r"tolerance above 0, and that of torch\.float64 is 0"):
        make(dtype=torch.float64)
    for tolerance, why in (
        (0.0, "0.0: with 0 nothing"),
        (-1.0, "with 0"),
        (1.0, "1.0: with 1 a query"),
        (math.nan, "nan$"),
    ):
        with pytest.raises(ValueError, match=f"tolerance between 0 and 1.* got .*{why}"):
            make(tolerance=tolerance)
    with pytest.raises(TypeError, match="tolerance must be a number between 0 and 1, or None; got '1e-3'"):
        make(tolerance="1e-3")
    for flat in ({"biased_heads": 2}, {"slopes": [0.5, 0.0, 0.1, 0.1]}):
        with pytest.raises(ValueError, match="to a head of slope 0 none does: use a full cache"):
            make(config=small_config(position_options=flat))
    with pytest.raises(ValueError, match="takes no capacity"):
        make(capacity=100)
    with pytest.raises(ValueError, match="on_failure must be"):
        make(on_failure="ignore")
    for position in ("rotary", "t5", "none", "sinusoidal", "learned"):
        with pytest.raises(ValueError, match=f"{position} has no certificate for evicted keys"):
            make(config=small_config(position))
    with pytest.raises(ValueError, match="causal"):
        make(config=small_config(causal=False))
    model = language_model()
    with pytest.raises(RuntimeError, match="forward only"):
        model(random_tokens(1, 5), cache=bounded_cache(model, 1))
    with pytest.raises(ValueError, match="leave one of them out"):
        model.generate(random_tokens(1, 5), max_new_tokens=1, bounded=True, use_cache=False)
    with pytest.raises(ValueError, match="at most the 0 tokens"):
        bounded_cache(model, 1).rollback(1)


def test_a_class_made_of_the_full_cache_is_not_bounded() -> None:
    class Own(ts.KeyValueCache):
        pass

    with pytest.raises(TypeError, match="Own is a full cache"):
        Own(small_config(), 1, bounded=True)


def test_it_is_a_key_value_cache_that_reports() -> None:
    model = language_model(**STEEP)
    cache = ts.KeyValueCache(model.config, 1, bounded=True)
    assert isinstance(cache, ts.KeyValueCache)
    assert isinstance(cache, BoundedCache)
    assert not isinstance(ts.KeyValueCache(model.config, 1), BoundedCache)
    in_pieces(model, random_tokens(1, 300), [300], cache)
    text = str(cache.report())
    assert "300 tokens in" in text
    assert "reruns: 0" in text
    assert [len(row) for row in cache.report().capacities] == [4, 4]
