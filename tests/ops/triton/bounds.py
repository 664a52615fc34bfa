"""Checks of every term of the kernels' bounds: whatever weakens a term fails its check (tests/ops/tight.py).

`CHECKS` are run by test_bounds.py as they are, and by tests/ops/mutants.py against kernels with an error put
in, both under Triton's interpreter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from tests.ops import tight
from tests.ops.bounds.windows import as_gates
from tests.ops.cases import random_case, random_gates
from tests.ops.dense import Case, dense
from tests.ops.generators import cases
from tests.ops.triton.interpreter import kept_by_both, quick_tiles, run_forward
from trainshort.ops.triton import shapes

SLOPES = [0.03, 0.05, 0.08]
UNIT = 64
NOISE = 1e-9


def assert_shares(case: Case, forward: float) -> None:
    """The forward pass skips at most this share of the tolerance, the backward pass at most all of it."""
    assert case.tolerance is not None
    weights = dense(case)[1]
    for kept, allowed in zip(kept_by_both(case), (forward, 1.0), strict=True):
        share = float(weights.masked_fill(kept, 0.0).sum(-1).max()) / case.tolerance
        assert share <= allowed + NOISE, f"skipped {share} times the tolerance, {allowed} is allowed"
        assert share > 0.0, "nothing was skipped"


def past() -> None:
    for tolerance in (2.0**-7, 2.0**-9):
        assert_shares(tight.tight_case(slopes=SLOPES, tolerance=tolerance, share=0.5), 0.5)


def past_of_shifted_keys() -> None:
    for size in (25.0, -25.0):
        assert_shares(tight.shifted(tight.tight_case(slopes=SLOPES, tolerance=2.0**-7, share=0.5), size), 0.5)


def future() -> None:
    slopes = [0.03, 0.06, 0.3]
    assert_shares(tight.tight_case(slopes=slopes, tolerance=2.0**-8, share=0.25, ahead=True, length=512), 0.25)
    assert_shares(
        tight.tight_case(slopes=slopes, tolerance=2.0**-8, share=0.25, ahead=True, offset=1.0, length=512), 0.25
    )


def outliers() -> None:
    for edge in (256, 320):
        assert_shares(tight.outlier_case(edge=edge), 0.5)
        assert_shares(tight.outlier_case(edge=edge, boost=0.9), 0.5)
        assert_shares(tight.outlier_case(slope=0.02, length=1025, edge=edge + 256), 0.5)


def beyond_the_sample() -> None:
    for tolerance in (2.0**-14, 0.01):
        case = replace(tight.longer_than_the_sample(), tolerance=tolerance)
        weights = dense(case)[1]
        for kept in kept_by_both(case):
            assert float(weights.masked_fill(kept, 0.0).sum(-1).max()) <= tolerance


def thinly_spread() -> None:
    assert_shares(tight.thinly_spread(0.01, 0.5), 0.5)
    assert_shares(tight.thinly_spread(0.01, 0.25, ahead=True), 0.25)


def decoding() -> None:
    """The output is the mass of keys that may be left out only if it is within the tolerance."""
    for slope in (0.02, 0.025, 0.1):
        case = tight.decoding_case(slope, 2.0**-10)
        with torch.no_grad():
            missed = float((dense(case)[0] - case.attend("triton")).abs().max())
        assert missed <= 2.0**-10 + 1e-6, f"skipped {missed * 2**10} times the tolerance"


def decoding_behind_the_keys() -> None:
    """A query that stands some steps behind all keys: the nearest key is not its own."""
    case = tight.decoding_case(0.1, 2.0**-10)
    case = replace(case, query_start=case.k.shape[2] + 40)
    with torch.no_grad():
        missed = float((dense(case)[0] - case.attend("triton")).abs().max())
    assert missed <= 2.0**-10 + 1e-6, f"skipped {missed * 2**10} times the tolerance"


def decoding_tiny_queries() -> None:
    """Squares of the queries, or of the keys, are lost in float32; their products are not."""
    for power in (-15, -19, -20, -22, -24, -25, -30):
        keys = torch.zeros(900)
        keys[5] = 1.0
        size = 10.0**power
        largest = 40.0 / size if power > -27 else 1e27
        case = Case(
            q=tight.line(torch.full((1, 1, 1), size)),
            k=tight.line(keys)[None, None] * largest,
            v=torch.randn(1, 1, 900, 16, generator=torch.Generator().manual_seed(0)),
            slopes=torch.tensor([0.03]),
            scale=1.0,
            key_norms=torch.full((1, 1), largest),
        )
        with torch.no_grad():
            torch.testing.assert_close(case.attend("triton"), dense(case)[0].float(), rtol=1e-4, atol=1e-5)


def decoding_not_finite() -> None:
    """Norms that say nothing (NaN, infinity): every key is visited."""
    for norm in (math.nan, math.inf, 1e31):
        case = tight.decoding_case(0.1, 2.0**-10)
        by_block = torch.full((1, 1, -(-case.k.shape[2] // 128)), tight.NORM)
        by_block[..., 0] = norm
        k = case.k.clone()
        k[:, :, 3] = tight.line(torch.tensor(200.0))
        case = replace(case, k=k, key_norms=by_block)
        with torch.no_grad():
            torch.testing.assert_close(case.attend("triton"), dense(case)[0].float(), rtol=1e-4, atol=1e-5)


# The same of a decay: slopes as gates, and gates of many kinds.


def decay() -> None:
    for tolerance in (2.0**-7, 2.0**-9):
        case = tight.tight_case(slopes=SLOPES, tolerance=tolerance, share=0.5)
        assert_shares(as_gates(case), 0.5)
        assert_shares(as_gates(tight.shifted(case, 25.0)), 0.5)


def decay_ahead() -> None:
    case = tight.tight_case(slopes=[0.03, 0.06, 0.3], tolerance=2.0**-8, share=0.25, ahead=True, length=512)
    assert_shares(as_gates(case), 0.25)
    assert_shares(as_gates(tight.thinly_spread(0.01, 0.25, ahead=True)), 0.25)


def decay_outliers() -> None:
    for edge in (256, 320):
        assert_shares(as_gates(tight.outlier_case(edge=edge)), 0.5)
        assert_shares(as_gates(tight.outlier_case(edge=edge, boost=0.9)), 0.5)
    assert_shares(as_gates(tight.thinly_spread(0.01, 0.5)), 0.5)


def decay_beyond_the_sample() -> None:
    case = as_gates(replace(tight.longer_than_the_sample(), tolerance=0.01))
    weights = dense(case)[1]
    for kept in kept_by_both(case):
        assert float(weights.masked_fill(kept, 0.0).sum(-1).max()) <= 0.01


def decay_of_many_kinds() -> None:
    for case in itertools.islice(cases(11, lengths=(129, 300), kinds="decay"), 6):
        given = replace(case, **{n: getattr(case, n).float() for n in ("q", "k", "v")}, tolerance=1e-3)
        weights = dense(given)[1]
        for kept, allowed in zip(kept_by_both(given), (0.5, 1.0), strict=True):
            share = float(weights.masked_fill(kept, 0.0).sum(-1).max()) / 1e-3
            assert share <= allowed + NOISE, f"skipped {share} times the tolerance, {allowed} is allowed"


def decay_decoding() -> None:
    """Open gates but for one, a cache whose keys before it attract as strongly as they can: how far c must fall there
    for them to go. The output is their mass."""
    keys, edge, tolerance = 900, 640, 2.0**-10
    k = torch.full((keys,), tight.NORM)
    k[edge:] = -tight.NORM
    v = torch.zeros(1, 1, keys, 16)
    v[:, :, :edge] = 1.0
    for share in (0.0, 0.5, 0.9, 0.99, 1.01):  # of what so many keys weigh together
        fall = tight.NORM - float(k[-1]) - math.log(tolerance) + share * math.log(keys) + 0.01
        gates = torch.zeros(1, 1, keys, dtype=torch.float64)
        gates[..., edge] = -fall
        case = Case(
            q=tight.line(torch.ones(1, 1, 1)), k=tight.line(k)[None, None], v=v, log_gates=gates, scale=1.0,
            tolerance=tolerance, key_norms=torch.full((1, 1), tight.NORM),
        )  # fmt: skip
        with torch.no_grad():
            out = case.attend("triton")
        missed = float((dense(case)[0] - out).abs().max())
        assert missed <= tolerance + 1e-6, f"skipped {missed / tolerance} times the tolerance"
        assert bool(out.any()) == (share < 1.0), "what may be skipped is skipped"
    k[edge : edge + UNIT] = tight.NORM  # the first unit behind the gate attracts, too
    v[:, :, edge : edge + UNIT] = 1.0
    case = replace(case, k=tight.line(k)[None, None])
    with torch.no_grad():
        torch.testing.assert_close(case.attend("triton"), dense(case)[0].float(), rtol=1e-4, atol=1e-5)


def decay_ingredients() -> None:
    """Whatever the length of a query up to the sample's, and beyond: all keys up to a unit weigh at most so much."""
    for seed in range(2):
        case = random_case(batch=1, heads=2, queries=330, dim=16, seed=seed, bias="gates")
        stretched = case.k * 10.0 ** torch.empty(case.k.shape[:3]).uniform_(-2.0, 1.0)[..., None]
        assert_decay_ingredients(replace(case, k=stretched))
        assert_decay_ingredients(replace(case, k=1e4 * case.k, log_gates=-1e4 * torch.rand(1, 2, 330)))
        assert_decay_ingredients(replace(case, k=stretched, log_gates=40.0 * random_gates(1, 2, 330, seed)))


def assert_decay_ingredients(case: Case) -> None:
    assert case.log_gates is not None
    config, _, scratch = run_forward(case)
    shape = (config.batch, config.heads, config.key_units)

    def part(name: str, size: tuple[int, ...]) -> Tensor:
        found = scratch[config.slices[name].offset :].view(torch.float32)[: math.prod(size)]
        return found.view(size).double()

    units = -(-case.k.shape[2] // UNIT)
    reach, effective, most = (part(name, shape)[..., :units] for name in ("REACH_PAST", "PASTS", "MOST_PAST"))
    assert bool((most >= effective.cummax(-1).values).all()), "not the largest so far"
    center = part("CENTER", (config.batch, config.kv_heads, config.dim))
    x = part("QUERY_NORM", shape[:2])[..., None]
    norms = (case.k.double() - center[:, :, None]).norm(dim=-1)  # [B, H, Tk]
    assert case.bias is not None
    level = case.bias.levels()[0]  # type: ignore[union-attr]
    ends = (torch.arange(1, units + 1) * UNIT).clamp(max=case.k.shape[2]) - 1
    for share in (0.0, 1e-3, 0.5, 1.0):
        weighed = torch.logcumsumexp(share * x * norms - level, dim=-1)[..., ends] + level[..., ends]
        bound = reach + share * x * effective * (1.0 + 2.0**-20)
        assert bool((weighed <= bound).all()), "the keys up to a unit weigh more than its K says"


# The numbers that a window is computed from, each on the right side of its inequality.


def _parts(case: Case) -> dict[str, Tensor]:
    config, _, scratch = run_forward(case)
    by_key_head = (config.batch, config.kv_heads, config.key_units)
    by_head = (config.batch, config.heads, config.key_units)
    sizes = {
        "QUERY_NORM": (config.batch, config.heads),
        "CENTER": (config.batch, config.kv_heads, config.dim),
        "NORM": by_key_head,
        "NORM_PAST": by_key_head,
        "PASTS": by_head,
        "MOST_PAST": by_head,
    }
    return {
        name: scratch[config.slices[name].offset :].view(torch.float32)[: math.prod(size)].view(size).double()
        for name, size in sizes.items()
    }


def assert_ingredients(case: Case) -> None:
    parts = _parts(case)
    batch, kv_heads, keys, _ = case.k.shape
    units = -(-keys // UNIT)
    group = case.q.shape[1] // kv_heads
    true = (case.k.double() - parts["CENTER"][:, :, None]).norm(dim=-1)
    padded = torch.nn.functional.pad(true, (0, units * UNIT - keys), value=-math.inf)
    padded = padded.view(batch, kv_heads, units, UNIT)
    norm = parts["NORM"][..., :units]
    assert bool((norm >= padded.amax(-1)).all()), "a norm below the longest key of its unit"
    assert bool((parts["NORM_PAST"][..., :units] >= norm.cummax(-1).values).all()), "not the largest so far"
    pasts = parts["PASTS"][..., :units]
    assert bool((parts["MOST_PAST"][..., :units] >= pasts.cummax(-1).values).all()), "not the largest so far"
    assert case.slopes is not None
    slope = case.slopes.double()[None, :, None, None]
    lengths = padded.repeat_interleave(group, dim=1)  # [B, H, units, UNIT]
    fade = -slope * torch.arange(UNIT - 1, -1, -1)
    whole = torch.logsumexp(fade, dim=-1)  # of a unit of keys without any length
    for part in (1.0, 0.5, 1e-3):
        x = (part * parts["QUERY_NORM"])[..., None, None]
        sums = torch.logsumexp(x * lengths + fade, dim=-1) - whole
        bound = x[..., 0] * pasts
        slack = 0.002 + 1e-6 * bound.abs()  # what first_needed spares for it
        assert bool((sums <= bound + slack).all()), "a unit weighs more than its K says"


def ingredients() -> None:
    for seed in range(3):
        case = random_case(batch=1, heads=2, queries=330, dim=16, seed=seed, slopes=torch.tensor([0.4, 0.03]))
        stretch = 10.0 ** torch.empty(case.k.shape[:3]).uniform_(-2.0, 1.0)[..., None]
        assert_ingredients(replace(case, k=case.k * stretch))
        common = case.k + 30.0
        common[:, :, 128:192] = 0.0  # longer than the others when seen from the centre
        assert_ingredients(replace(case, k=common))
        assert_ingredients(replace(case, k=1e4 * case.k))
    steep = random_case(batch=1, heads=2, queries=200, dim=16, slopes=torch.tensor([30.0, 3.0]))
    steep.k[:, :, ::64] *= 30.0  # the oldest key of a unit, whose weight is all but lost
    assert_ingredients(replace(steep, q=20.0 * steep.q))


def ingredients_tiny() -> None:
    """Keys whose squares float32 loses."""
    case = random_case(batch=1, heads=2, queries=200, dim=16)
    for size in (1e-19, 1e-21, 1e-23):
        assert_ingredients(replace(case, k=size * case.k))


def not_finite() -> None:
    """NaN, infinity and lengths that float32 can't square make a bound infinite."""
    for value in (math.nan, math.inf, 3e20):
        case = random_case(batch=1, heads=1, queries=330, dim=16, slopes=torch.tensor([0.5]), tolerance=2.0**-7)
        case.k[0, 0, 10, 3] = value
        kept = kept_by_both(case)[0]
        assert bool((kept | ~case.seen).all()), "a key that is not finite was not visited"


CHECKS: dict[str, Callable[[], None]] = {}


def _small(check: Callable[[], None]) -> Callable[[], None]:
    """With windows at any length, and tiles that the interpreter runs fast."""

    def run() -> None:
        from trainshort.ops.triton import launch

        with (
            mock.patch.object(shapes, "SHORTEST", 1),
            mock.patch.object(launch, "MOST_SPLITS", 4),
            quick_tiles(dtypes=(torch.float32,)),
        ):
            check()

    return run


for _check in (
    past, past_of_shifted_keys, future, outliers, beyond_the_sample, thinly_spread, decoding,
    decoding_behind_the_keys, decoding_tiny_queries, decoding_not_finite, ingredients, ingredients_tiny, not_finite,
    decay, decay_ahead, decay_outliers, decay_beyond_the_sample, decay_of_many_kinds, decay_decoding,
    decay_ingredients,
):  # fmt: skip
    CHECKS[_check.__name__] = _small(_check)
