"""A bounded cache under forget gates loses no more than its tolerance, and holds what the gates have left open."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import trainshort as ts
from tests.models.small import FOX_PRO, in_pieces, language_model, left_padded, random_tokens, small_config
from tests.models.test_bounded import (  # noqa: F401
    ANY_SIZES,
    HEADS,
    KV_HEADS,
    LAYERS,
    WIDTH,
    Given,
    bounded_cache,
    small_rings,
)
from trainshort.models import bounded_gates
from trainshort.models.bounded import BoundedCache
from trainshort.models.bounded_gates import GatedKeys
from trainshort.models.head_parts import HeadNorm
from trainshort.ops.evicted import NOTHING


class Gated(Given):
    """The same with log gates [L, B, H, T] in place of slopes."""

    def __init__(self, length: int, *, gate: float = 0.9, **options: Any) -> None:
        super().__init__(length, **options)
        self.log_gates = torch.full((LAYERS, self.batch, HEADS, length), math.log(gate), dtype=torch.float64)
        self.padding = torch.zeros(self.batch, dtype=torch.int64)

    def cache(self, **options: Any) -> BoundedCache:
        config = ts.ModelConfig(
            d_model=HEADS * WIDTH, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, position="fox"
        )
        cache = ts.KeyValueCache(config, self.batch, bounded=True, dtype=self.dtype, **options)
        assert isinstance(cache, BoundedCache)
        return cache

    def attend(self, cache: BoundedCache, sizes: list[int], start: int = 0) -> Tensor:
        pieces = []
        for size in sizes:
            part = slice(start, start + size)
            cache.reserve(size)
            outs = []
            for layer in range(LAYERS):
                q, k, v = (each[layer, :, :, part] for each in (self.q, self.k, self.v))
                bias = cache.decay(layer, self.log_gates[layer, :, :, part])
                outs.append(cache.attend(layer, q, k, v, bias=bias, scale=self.scale))
            pieces.append(torch.stack(outs))
            cache.advance(size)
            start += size
        return torch.cat(pieces, dim=3)

    def faded(self) -> Tensor:
        """The sum of the log gates after key j up to query i, [L, B, H, T, T], each summed for itself."""
        gates = self.log_gates.double()
        place = torch.arange(self.length)
        links = gates[..., None, :].expand(*gates.shape, self.length)
        after = place[:, None] < place  # [j, t]
        sums = links.masked_fill(~after, 0.0).cumsum(-1)  # [..., j, i]
        return sums.transpose(-1, -2)

    def weights(self) -> Tensor:
        k = self.k.double().repeat_interleave(HEADS // KV_HEADS, 2)
        scores = self.q.double() @ k.transpose(-1, -2) * self.scale + self.faded()
        place = torch.arange(self.length)
        hidden = (place[:, None] < place) | (place < self.padding[:, None, None])[:, None]
        return scores.masked_fill(hidden, -math.inf).softmax(-1)

    def error(self, found: Tensor) -> float:
        """Of outputs that are there, those of padding are nobody's."""
        apart = torch.linalg.vector_norm(found - self.dense(), dim=-1)
        real = torch.arange(self.length) >= self.padding[:, None]
        return float(apart.masked_fill(~real[:, None], 0.0).amax())


def hostile_gates(kind: str, shape: torch.Size, seed: int) -> Tensor:
    """Log gates, float64."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(shape, generator=generator, dtype=torch.float64)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    open_then_closed = torch.where(torch.arange(shape[-1]) % 200 < 150, 0.0, -0.7).expand(shape)
    kinds = {
        "sigmoid": torch.nn.functional.logsigmoid(2.0 + 2.0 * normal),
        "around a half": noise.log(),
        "open": torch.zeros(shape, dtype=torch.float64),
        "nearly open": -1e-8 * noise,
        "open, then closed": open_then_closed.double(),
        "borders": torch.where(noise < 0.01, -math.inf, -0.05 * noise),
        "borders everywhere": torch.where(noise < 0.5, -math.inf, 0.0).double(),
        "cliffs": torch.where(noise < 0.02, -1e5, -0.1 * noise),
        "a precipice": torch.where(noise < 0.005, -5e7, -0.1),
        "by head": -torch.logspace(-3, 1, HEADS, dtype=torch.float64)[:, None].expand(shape),
        "by row": -torch.logspace(-2, 0, shape[1], dtype=torch.float64)[:, None, None].expand(shape),
    }
    return kinds[kind].clone()


KINDS = [
    "sigmoid", "around a half", "open", "nearly open", "open, then closed", "borders", "borders everywhere", "cliffs",
    "a precipice", "by head", "by row",
]  # fmt: skip


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=ANY_SIZES,
    kind=st.sampled_from(KINDS),
    tolerance=st.sampled_from([0.3, 1e-3, 1e-9]),
    query_size=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    common=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 50),
)
def test_outputs_are_within_the_bound(
    sizes: list[int], kind: str, tolerance: float, query_size: float, common: float, seed: int
) -> None:
    """Unless the cache says that a certificate failed."""
    text = Gated(sum(sizes), seed=seed)
    text.q *= query_size
    text.k += common
    text.log_gates = hostile_gates(kind, text.log_gates.shape, seed)
    cache = text.cache(tolerance=tolerance)
    found = text.attend(cache, sizes)
    if not cache.failed():
        assert text.error(found) <= tolerance * text.diameter() + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_without_surprises_certificates_hold(kind: str) -> None:
    """Queries and keys as at the start: nothing fails, and what is lost is within the bound."""
    text = Gated(900, seed=4)
    text.log_gates = hostile_gates(kind, text.log_gates.shape, 4)
    cache = text.cache(tolerance=1e-3)
    found = text.attend(cache, [150] + [1] * 300 + [200, 3] + [1] * 247)
    assert not cache.failed()
    assert text.error(found) <= 1e-3 * text.diameter()
    report = cache.report()
    assert report.keys_held + report.evictions == 900 * text.batch * LAYERS * KV_HEADS
    assert (report.evictions == 0) == (kind in ("open", "nearly open", "by row"))  # a row of gates of 0.99 needs all


@pytest.mark.parametrize("common", [0.0, 3.0])
def test_the_excess_is_that_of_the_proof(common: float) -> None:
    """Of every call: what evicted keys could weigh by their norms, against what the others do, both in float64."""
    tolerance, text = 0.1, Gated(500, batch=1, seed=3)
    text.log_gates = hostile_gates("around a half", text.log_gates.shape, 3) * 0.5
    text.k = text.k / torch.linalg.vector_norm(text.k, dim=-1, keepdim=True) + common  # norms alike: chords are tight
    cache, start, seen, faded = text.cache(tolerance=tolerance), 0, 0, text.faded()
    for size in [200, 1, 1, 90] + [1] * 88 + [120]:
        rings = None if cache.held is None else list(cache.held.rings)
        text.attend(cache, [size], start=start)
        held = cache.held
        assert held is not None
        for layer in range(LAYERS):
            for head in range(HEADS):
                if rings is None:
                    continue
                run = next(run for run in rings[layer].runs if head // 2 < run.heads.stop)
                low = run.low(start + (1 if size == 1 else 0))
                assert low > 0
                k = text.k[layer, 0, head // 2] - held.center[layer, 0, head // 2]
                expected = -math.inf
                for p in range(start, start + size):
                    q, bias = text.q[layer, 0, head, p], faded[layer, 0, head, p]
                    x = float(torch.linalg.vector_norm(q)) * text.scale
                    bound = x * torch.linalg.vector_norm(k[:low], dim=-1) + bias[:low]
                    scores = (k[: p + 1] @ q) * text.scale + bias[: p + 1]
                    expected = max(expected, float(torch.logsumexp(bound, 0) - torch.logsumexp(scores[low:], 0)))
                found = float(held.excess[layer, 0, head]) + math.log(tolerance / 2)
                seen += 1
                assert expected - 1e-9 <= found <= expected + 0.05
        held.excess.fill_(-math.inf)
        start += size
    assert seen > 400


def held_keys(gate: float, length: int, **options: Any) -> tuple[list[int], BoundedCache]:
    """Bytes after every 500 tokens, in pieces and steps."""
    text = Gated(length, gate=gate, batch=1)
    text.log_gates *= torch.linspace(0.5, 1.5, HEADS)[:, None]
    cache, held = text.cache(tolerance=1e-4, **options), []
    for start in range(0, length, 500):
        text.attend(cache, [400] + [1] * 100, start=start)
        held.append(cache.report().nbytes)
    assert not cache.failed()
    return held, cache


@pytest.mark.slow
@pytest.mark.parametrize("gate", [0.5, 0.8, 0.9, 0.98])
def test_memory_does_not_grow(gate: float) -> None:
    held, cache = held_keys(gate, 8_000)
    assert max(held[7:]) == min(held[7:]) == held[-1]
    report = cache.report()
    assert report.nbytes < report.full_bytes / (2 if gate == 0.98 else 8)
    assert report.share_of_keys < (0.4 if gate == 0.98 else 0.1)


def test_open_gates_hold_everything_and_say_so() -> None:
    """And once they close, all of it goes, in pieces and in steps alike."""
    text = Gated(4000, gate=1.0, batch=1)
    text.log_gates[..., 3000:] = math.log(0.5)
    full = text.cache(tolerance=1e-4)
    text.attend(full, [1000] + [1] * 200 + [900] * 2)
    opened = full.report()
    assert opened.evictions == 0
    assert opened.share_of_keys == 1.0
    assert opened.nbytes > opened.full_bytes
    for sizes in ([1] * 400 + [300, 300], [1] * 1000):
        cache = copy.deepcopy(full)
        text.attend(cache, sizes, start=3000)
        closed = cache.report()
        assert not cache.failed()
        assert closed.nbytes < opened.nbytes / 8
        assert closed.keys_held <= 256 * LAYERS * KV_HEADS
        for rings, most in zip(cache.held.rings, closed.capacities, strict=True):
            assert all(now <= limit for now, limit in zip(rings.capacities, most, strict=True))


def test_rings_become_shorter_between_steps() -> None:
    """Those of the heads whose gates close, while their neighbours keep everything: outputs are within the bound."""
    text = Gated(700, gate=1.0, batch=1)
    text.log_gates[0, :, 2:, 520:] = math.log(0.5)  # the second key head, in the first layer alone
    cache = text.cache(tolerance=1e-4)
    found = text.attend(cache, [500] + [1] * 200)
    assert not cache.failed()
    assert text.error(found) <= 1e-4 * text.diameter()
    assert cache.held.rings[0].capacities[1] <= 256 < 700 <= cache.held.rings[0].capacities[0]
    assert cache.held.capacity_of.tolist() == [rings.capacities for rings in cache.held.rings]
    others = [*cache.held.rings[0].runs[:1], *cache.held.rings[1].runs]
    assert all(run.low(text.length) == 0 for run in others)


@pytest.mark.parametrize("sizes", [[700, 1], [600] + [1] * 101, [300, 400, 1]], ids=len)
@pytest.mark.parametrize("gate", [1.0, 0.9])
def test_a_border_lets_everything_before_it_go(sizes: list[int], gate: float) -> None:
    """A gate of zero at token 560: what lies before is evicted or was so, and long queries behind it do not mind."""
    text = Gated(sum(sizes) + 200, gate=gate)
    text.log_gates[..., 560] = -math.inf
    text.q[..., 560:, :] *= 50.0
    cache = text.cache(tolerance=1e-3)
    found = text.attend(cache, [*sizes, 100] + [1] * 100)
    assert not cache.failed()
    assert text.error(found) <= 1e-9 + 1e-3 * text.diameter()
    rings = [run for rings in cache.held.rings for run in rings.runs]
    assert all(run.low(text.length) > 300 for run in rings)


@pytest.mark.parametrize("size", [1, 30])
def test_what_was_evicted_before_a_border_is_forgotten(size: int) -> None:
    """In the row and head that it belongs to, and there alone."""
    text = Gated(400 + size, gate=0.8)
    text.log_gates[1, 0, 2, 400] = -math.inf
    text.q[..., 400:, :] *= 1e3
    cache = text.cache(tolerance=1e-3)
    text.attend(cache, [300] + [1] * 100)
    assert bool((cache.held.evicted.table > NOTHING / 2).all())
    text.attend(cache, [size], start=400)
    forgotten = (cache.held.evicted.table < NOTHING / 2).all(-1)
    assert forgotten.nonzero().tolist() == [[1, 0, 2]]
    assert (cache.held.excess <= 0).nonzero().tolist() == [[1, 0, 2]]  # in all others queries are too long


def test_a_border_in_one_row_and_head_alone() -> None:
    """The others of its group still see all: nothing is evicted, and nothing crosses the border."""
    text = Gated(400, gate=1.0)
    text.log_gates[1, 0, 2, 250] = -math.inf
    cache = text.cache(tolerance=1e-3)
    found = text.attend(cache, [240] + [1] * 30 + [130])
    assert text.error(found) <= 1e-12
    assert cache.report().evictions == 0


def test_a_query_that_turns_long_is_noticed() -> None:
    text = Gated(600)
    text.q *= 0.1
    text.q[:, :, :, 599] = 400.0 * text.k[:, :, :, 5].repeat_interleave(2, 2)
    for sizes in ([200] + [1] * 399, [200, 399]):
        cache = text.cache(tolerance=1e-3)
        text.attend(cache, sizes)
        assert not cache.failed()
        text.attend(cache, [1], start=599)
        assert cache.failed()


@pytest.mark.slow
def test_levels_stay_small_in_texts_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted from a token that is not far back, and outputs are those of gates summed for themselves."""
    monkeypatch.setattr(bounded_gates, "LOWEST", -20.0)
    text = Gated(1500, gate=0.5, batch=1)
    cache = text.cache(tolerance=1e-6)
    found = text.attend(cache, [200] + [1] * 700 + [300, 300])
    assert not cache.failed()
    assert text.error(found) <= 1e-6 * text.diameter()
    held = cache.held
    assert isinstance(held, GatedKeys)
    assert float(held.last.amin()) >= -20.0 - 0.7 * 300


def test_float32_and_half_are_within_the_bound_and_rounding() -> None:
    for dtype, rounding in ((torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        text = Gated(400, gate=0.8, dtype=dtype)
        cache = text.cache(tolerance=1e-4)
        found = text.attend(cache, [150, 1, 1, 1, 120] + [1] * 127)
        assert not cache.failed()
        assert cache.report().evictions > 0
        assert float((found.double() - text.dense()).abs().amax()) <= rounding


def test_padding() -> None:
    text = Gated(500, gate=0.8)
    text.padding = torch.tensor([0, 170])
    cache = text.cache(tolerance=1e-3)
    cache.pad_left(torch.arange(300) >= text.padding[:, None])
    for each in (text.q, text.k, text.v):
        each[:, 1, :, :170] = math.nan
    text.log_gates[:, 1, :, :170] = -math.inf
    found = text.attend(cache, [300])
    assert int(cache.held.capacity_of.amin()) > 300 - 170
    assert bool((cache.held.evicted.table[:, 0] > NOTHING / 2).all())
    assert bool((cache.held.evicted.table[:, 1] < NOTHING / 2).all())  # padding alone is gone, which weighs nothing
    found = torch.cat((found, text.attend(cache, [1] * 100 + [100], start=300)), 3)
    assert not cache.failed()
    text.log_gates[:, 1, :, :170] = 0.0
    for each in (text.q, text.k, text.v):
        each[:, 1, :, :170] = 0.0
    assert text.error(found) <= 1e-3 * text.diameter()
    assert cache.report().evictions > 0


@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_are_never_certified(bad: float, where: str) -> None:
    for sizes in ([300, 100], [300] + [1] * 100, [400]):
        text = Gated(400)
        getattr(text, where)[1, 0, 1, 250] = bad
        cache = text.cache(tolerance=1e-3)
        assert text.is_refused(cache, sizes)


@pytest.mark.parametrize("bad", [math.nan, 0.1])
@pytest.mark.parametrize("size", [1, 10])
def test_gates_that_are_none_are_refused(bad: float, size: int) -> None:
    text = Gated(210)
    text.log_gates[1, 0, 1, 200] = bad
    cache = text.cache(tolerance=1e-3)
    text.attend(cache, [200])
    with pytest.raises(ValueError, match="log_gates must be at most 0"):
        text.attend(cache, [size], start=200)


# Whole models.


def fox_model(gate_bias: float = 0.0, **changes: Any) -> ts.LanguageModel:
    model = language_model("fox", **changes)
    with torch.no_grad():
        for block in model.trunk.blocks:
            block.attention.gates.logits.bias.fill_(gate_bias)
    return model


@settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sizes=ANY_SIZES, kv_heads=st.sampled_from([1, 2, 4]), gate_bias=st.sampled_from([0.0, 3.0]))
def test_any_way_of_feeding(sizes: list[int], kv_heads: int, gate_bias: float) -> None:
    model, tokens = fox_model(gate_bias, num_kv_heads=kv_heads), random_tokens(2, sum(sizes))
    with torch.no_grad():
        expected = model(tokens)
    cache = bounded_cache(model, 2)
    found = in_pieces(model, tokens, sizes, cache)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-4)
    assert cache.length == sum(sizes)
    assert not cache.failed()


def startling_fox(startling: int, usual: int) -> ts.LanguageModel:
    """As `startling_model` of test_bounded, with gates."""
    model = fox_model()
    block = model.trunk.blocks[0]
    with torch.no_grad():
        normed = block.attention_norm(model.trunk.embedding.weight)
        basis = torch.linalg.qr(normed[:usual].T).Q
        direction = normed[startling] - basis @ (basis.T @ normed[startling])
        direction = direction / (direction @ normed[startling])
        block.attention.qkv.weight[:32] += 100.0 * torch.ones(32)[:, None] * direction
    return model


@pytest.mark.parametrize("sizes", [[500, 100], [400] + [1] * 200], ids=len)
def test_a_hostile_token_makes_the_text_run_again(sizes: list[int]) -> None:
    model, tokens = startling_fox(60, 20), random_tokens(1, 600, vocabulary=20)
    tokens[0, -20] = 60
    with torch.no_grad():
        expected = model(tokens)
    cache = bounded_cache(model, 1, tolerance=1e-4)
    found = in_pieces(model, tokens, sizes, cache)
    assert cache.report().reruns > 0
    assert cache.length == 600
    assert not cache.failed()
    torch.testing.assert_close(found[:, -20:], expected[:, -20:], rtol=1e-3, atol=1e-2)
    cache = bounded_cache(model, 1, tolerance=1e-4, on_failure="raise")
    in_pieces(model, tokens[:, :500], [500], cache)
    with pytest.raises(ts.BoundedCacheError, match="after 500 tokens evicted keys could hold more"):
        in_pieces(model, tokens[:, 500:], [100], cache)
    again = in_pieces(model, tokens[:, 500:], [100], cache)
    torch.testing.assert_close(again, expected[:, 500:], rtol=1e-3, atol=1e-2)


def test_left_padding_and_generation() -> None:
    model = fox_model(num_kv_heads=2, **FOX_PRO)
    rows = [random_tokens(1, length, seed=length)[0] for length in (300, 150, 20)]
    tokens, mask = left_padded(rows)
    options: dict[str, Any] = {"max_new_tokens": 100, "temperature": 0.0, "key_padding_mask": mask}
    expected = model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, bounded=True, **options), expected)
    more = random_tokens(3, 120, seed=9)
    cache = bounded_cache(model, 3)
    in_pieces(model, tokens, [300], cache, key_padding_mask=mask)
    found = in_pieces(model, more, [1] * 60 + [60], cache)
    assert cache.report().evictions > 0
    with torch.no_grad():
        for row, text in enumerate(rows):
            alone = model(torch.cat((text, more[row]))[None])[0]
            torch.testing.assert_close(found[row], alone[len(text) :], rtol=2e-5, atol=2e-4)


def test_it_says_why_it_does_not_step() -> None:
    cache = bounded_cache(fox_model(), 1)
    assert "gates" in str(cache.why_not_stepping())
    with pytest.raises(RuntimeError, match=r"cannot step: .* gates"):
        cache.begin_steps()


# Norms that have a bound.


@pytest.mark.slow
@pytest.mark.parametrize("position", ["fox", "alibi"])
def test_with_qk_norm_nothing_ever_runs_again(position: str) -> None:
    """The worst that norms allow, at any moment of a text of short queries: a long one that points to where all
    evicted keys lie, and away from all keys that are there."""
    options = {"slopes": [1.0, 0.5, 0.3, 0.2]} if position == "alibi" else {}
    model = language_model(position, qk_norm=True, num_kv_heads=2, position_options=options)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, HeadNorm):
                module.weight.fill_(1.3)
    longest = 1.3 * torch.ones(model.config.width)  # what the norm makes of equal channels

    @torch.no_grad()
    def attend(cache: BoundedCache, size: int, query: float, key: float) -> None:
        cache.reserve(size)
        q, k = (share * longest.expand(1, heads, size, -1) for share, heads in ((query, 4), (key, 2)))
        for layer in range(2):
            bias = cache.decay(layer, torch.full((1, 4, size), -0.1)) if position == "fox" else model.position.bias()
            cache.attend(layer, q, k, k, bias=bias, scale=model.config.score_scale)
        cache.advance(size)

    cache = bounded_cache(model, 1, tolerance=1e-4)
    attend(cache, 700, 0.01, 1.0)
    assert cache.report().evictions > 0
    for moment in range(550):
        attend(cache, 1, 0.01, -1.0)
        if moment % 10 == 0:
            for size in (1, 9):
                probe = copy.deepcopy(cache)
                attend(probe, size, 1.0, -1.0)
                assert not probe.failed()


@pytest.mark.parametrize("position", ["fox", "alibi"])
def test_long_queries_come_as_no_surprise_to_models_with_qk_norm(position: str) -> None:
    model, tokens = language_model(position, num_kv_heads=2, **FOX_PRO), random_tokens(1, 700)
    with torch.no_grad():
        model.trunk.embedding.weight[7] *= 100.0  # one token that would startle others
        cache = bounded_cache(model, 1)
        found = in_pieces(model, tokens, [300] + [1] * 200 + [200], cache)
        expected = model(tokens)
    assert cache.report().reruns == 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_bounds_of_norms_are_what_a_norm_can_reach() -> None:
    model = language_model("fox", num_kv_heads=2, **FOX_PRO)
    queries, keys = model.trunk.norm_bounds()
    assert queries.shape == (2, 4)
    assert keys.shape == (2, 2)
    for layer, block in enumerate(model.trunk.blocks):
        for norm, bound in ((block.attention.query_norm, queries[layer]), (block.attention.key_norm, keys[layer])):
            heads, width = norm.weight.shape
            axes = 1e3 * torch.eye(width).expand(1, heads, width, width)
            reached = torch.linalg.vector_norm(norm(axes), dim=-1).amax((0, 2))
            assert bool((reached <= bound).all())
            assert bool((bound <= 1.07 * reached).all())
    cache = bounded_cache(model, 1)
    in_pieces(model, random_tokens(1, 5), [5], cache)
    with pytest.raises(ValueError, match="before the first token"):
        cache.expect_norms(queries, keys)


def test_gates_belong_to_models_with_gates() -> None:
    cache = ts.KeyValueCache(small_config(), 1, bounded=True)
    with pytest.raises(TypeError, match="given gates, and its position 'alibi' has none"):
        cache.decay(0, torch.zeros(1, 4, 1))
    gated = ts.KeyValueCache(small_config("fox"), 1, bounded=True)
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(TypeError, match="needs the bias that its `decay` makes"):
        gated.attend(0, x, x, x, bias=None, scale=1.0)
