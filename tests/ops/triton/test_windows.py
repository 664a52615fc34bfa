"""The kernels' windows keep the promise: no query skips more softmax mass than the tolerance, whatever the inputs.

The mass is computed in float64 over the windows as the kernels read them, in the forward pass (a bound from norms)
and in the backward pass (what the forward pass found), and over what `certified_blocks` says.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops import hostile
from tests.ops.cases import left_padding, random_case, right_padding
from tests.ops.dense import Case, dense
from tests.ops.triton.features import STEEP, STEEP_BY_ROW, small, symmetric
from tests.ops.triton.interpreter import backward_windows, kept_by_both, kept_by_forward, problem_of

TOLERANCES = [2.0**-24, 2.0**-14, 0.2]
FLOAT64_NOISE = 1e-9
HALF = [
    n for n in hostile.FINITE if n not in ("huge_range", "tiny_range", "aligned_keys", "outlier_key", "tiny_norms")
]


def missed(case: Case, kept: Tensor) -> Tensor:
    """The softmax mass of each query outside a set of pairs, [B, H, Tq]."""
    return dense(case)[1].masked_fill(kept, 0.0).sum(-1)


def assert_sound(case: Case, tolerances: list[float] = TOLERANCES) -> None:
    for tolerance in tolerances:
        case = replace(case, tolerance=tolerance)
        # Half of the tolerance is for what the forward pass skips, all of it for what the backward pass skips.
        for kept, allowed in zip(kept_by_both(case), (0.5, 1.0), strict=True):
            share = float(missed(case, kept).max()) / tolerance
            assert share <= allowed + FLOAT64_NOISE, f"skipped {share} times the tolerance of {tolerance}"
            sees = case.seen.any(-1)
            assert bool((kept & case.seen).any(-1)[sees].all()), "a query that sees keys must keep one"


LAYOUTS: dict[str, dict] = {
    "causal": small(queries=400, slopes=STEEP),
    "causal_gentle": small(queries=400, slopes=torch.tensor([0.05, 1e-4])),
    "symmetric": symmetric(queries=400, slopes=STEEP),
    "one_sided": symmetric(queries=400, slopes=STEEP, sees=("past", "future")),
    "left_right": symmetric(queries=300, slopes=STEEP, future=STEEP.flip(0) / 3, offset=0.7),
    "by_row": small(batch=2, queries=300, slopes=STEEP_BY_ROW),
    "offset": symmetric(queries=300, slopes=STEEP, offset=1.0),
    "grouped": small(queries=300, heads=4, kv_heads=2, slopes=torch.tensor([0.9, 0.01, 0.3, 0.1])),
    "left_padding": small(batch=2, queries=400, slopes=STEEP, key_padding_mask=left_padding(400, 233, length=400)),
    "right_padding": small(batch=2, queries=400, slopes=STEEP, key_padding_mask=right_padding(390, 100, length=400)),
    "padding_symmetric": symmetric(
        batch=2, queries=300, slopes=STEEP, key_padding_mask=left_padding(290, 0, length=300)
    ),
    "packed": small(queries=400, slopes=STEEP, cu_seqlens=torch.tensor([0, 5, 5, 300, 320, 400])),
    "packed_symmetric": symmetric(queries=400, slopes=STEEP, cu_seqlens=torch.tensor([0, 190, 210, 400])),
    "fewer_queries": small(queries=70, keys=400, slopes=STEEP),
    "fewer_queries_symmetric": symmetric(queries=70, keys=400, slopes=STEEP),
    "more_queries": small(queries=300, keys=200, slopes=STEEP),
    "query_start": small(queries=100, keys=400, query_start=200, slopes=STEEP),
    "query_start_by_row": small(batch=2, queries=100, keys=400, query_start=torch.tensor([290, -10]), slopes=STEEP),
    "query_start_beyond": small(queries=100, keys=300, query_start=420, slopes=STEEP / 10),
    "query_start_beyond_symmetric": symmetric(queries=100, keys=300, query_start=350, slopes=STEEP / 10),
    "query_start_before_symmetric": symmetric(queries=100, keys=300, query_start=-60, slopes=STEEP),
    "scale_negative": small(queries=300, slopes=STEEP, scale=-2.0),
    "one_dimension": small(queries=300, slopes=STEEP, dim=1, scale=3.0),
    "forty_dimensions": small(queries=300, slopes=STEEP, dim=40, dtype=torch.float16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str) -> None:
    case = random_case(**LAYOUTS[layout])
    assert_sound(case, TOLERANCES[1:])
    assert_sound(replace(case, q=4.0 * case.q, k=3.0 * case.k + 1.0), [0.2])


def of_two_heads(arguments: dict, row: int = -1) -> dict:
    """The last row of the shared set, its steepest and its gentlest head."""
    slopes = arguments["slopes"]
    cut = {n: arguments[n][[row]][:, ::3] for n in "qkv"}
    return arguments | cut | {"slopes": slopes[[row]][:, ::3] if slopes.dim() == 2 else slopes[::3]}


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["causal", "symmetric"])
@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_inputs(name: str, causal: bool) -> None:
    assert_sound(Case(**of_two_heads(hostile.FINITE[name](400)), causal=causal), [2.0**-24, 0.2])


@pytest.mark.parametrize("name", HALF)
def test_hostile_inputs_in_float16(name: str) -> None:
    assert_sound(Case(**of_two_heads(hostile.FINITE[name](400, torch.float16))), [2.0**-14])


@pytest.mark.parametrize("seed", range(12))
def test_random_stretches(seed: int) -> None:
    """Keys of any length, with and without a common part, loud and quiet queries; a sample never saw the longest."""
    generator = torch.Generator().manual_seed(seed)
    case = random_case(
        **small(queries=330, causal=seed % 2 == 0, seed=seed, dtype=[torch.float32, torch.float16][seed % 3 == 0])
    )
    slopes = 2.0 ** (-8.0 * torch.rand(2, generator=generator))
    stretch = 10.0 ** torch.empty(case.k.shape[:3]).uniform_(-2.0, 1.5, generator=generator)[..., None]
    shift = (seed % 4) * 2.0 * torch.randn(16, generator=generator)
    loud = 10.0 ** torch.empty(case.q.shape[:3]).uniform_(-1.0, 0.7, generator=generator)[..., None]
    dtype = case.q.dtype
    case = replace(case, slopes=slopes, k=(case.k * stretch + shift).to(dtype), q=(case.q * loud).to(dtype))
    assert_sound(case, [2.0**-14, 0.2])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("name", hostile.NON_FINITE)
def test_what_is_not_finite_is_visited(name: str, causal: bool) -> None:
    """A query with one visits everything, and so does whoever may see a key with one."""
    arguments = hostile.NON_FINITE[name](300)
    tensor, row, head, position = arguments.pop("poisoned")
    arguments |= {n: arguments[n][[row]][:, [head]] for n in "qkv"} | {"slopes": torch.tensor([0.9])}
    case = Case(**arguments, causal=causal)
    for kept in kept_by_both(case):
        whole = (kept | ~case.seen)[0, 0]  # [Tq, Tk]
        if tensor == "q":
            assert bool(whole[position].all())
        else:
            assert bool(whole[position:].all())
            assert causal or bool(whole.all())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_but_what_is_not_finite(value: float) -> None:
    case = random_case(**small(queries=300, slopes=STEEP))
    for name in ("q", "k"):
        bad = replace(case, **{name: torch.full_like(getattr(case, name), value)})
        for kept in kept_by_both(bad):
            assert bool((kept | ~bad.seen).all())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("packed")])
def test_certified_blocks_hold_what_the_kernels_visit(layout: str) -> None:
    case = random_case(**LAYOUTS[layout], tolerance=1e-2)
    visited = kept_by_forward(case) & case.seen
    for block in (64, 256):
        check_certified_blocks(case, block, visited)


def check_certified_blocks(case: Case, block: int, visited: Tensor) -> None:
    from trainshort.ops.triton import launch

    windows = launch.certified_blocks(problem_of(case), block)
    assert windows is not None
    queries, keys = case.q.shape[2], case.k.shape[2]
    assert windows.dtype == torch.int32
    assert windows.shape == (*case.q.shape[:2], -(-queries // block), 2)
    assert int(windows.min()) >= 0
    assert int(windows.max()) <= -(-keys // block)
    each = windows.repeat_interleave(block, dim=2)[:, :, :queries]
    key_block = torch.arange(keys) // block
    kept = (key_block >= each[..., :1]) & (key_block < each[..., 1:])
    assert not bool((visited & ~kept).any()), "a pair that is visited is not reported"
    assert float(missed(case, kept).max()) <= 1e-2
    if case.key_padding_mask is None and block == 64:
        assert torch.equal(kept & case.seen, visited)


def test_certified_blocks_have_nothing_to_say_elsewhere() -> None:
    from trainshort.ops.triton import launch

    packed = random_case(**LAYOUTS["packed"])
    assert launch.certified_blocks(problem_of(packed), 128) is None
    causal = random_case(**LAYOUTS["causal"])
    assert launch.certified_blocks(problem_of(causal), 100) is None
    assert launch.certified_blocks(problem_of(replace(causal, tolerance=0.0)), 128) is None


def test_windows_are_small_where_they_should_be() -> None:
    """A bound that is safe because it visits everything is of no use."""
    for causal in (True, False):
        case = random_case(**small(queries=400, dim=64, slopes=torch.tensor([0.9, 0.7]), causal=causal))
        kept = kept_by_forward(case) & case.seen
        assert float(kept.sum()) < 0.75 * float(case.seen.sum())
        assert int(kept.sum(-1).max()) <= (256 if causal else 384)


def test_what_mattered_is_less_than_what_could() -> None:
    for causal in (True, False):
        about = {"dim": 64, "slopes": torch.tensor([0.15, 0.1]), "causal": causal, "tolerance": 2.0**-14}
        case = random_case(**small(queries=600, **about))
        could, did = (kept & case.seen for kept in kept_by_both(case))
        assert float(did.sum()) < 0.85 * float(could.sum())
        assert not bool((did & ~could).any())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("place", [3, 60, 70, 120, 250])
def test_a_long_key_anywhere_in_its_block(place: int, causal: bool) -> None:
    """A bound for a whole unit says nothing of a part of it: windows must not end inside."""
    case = random_case(**small(queries=450, slopes=STEEP, causal=causal))
    k = case.k.clone()
    k[:, :, place] *= 40.0
    assert_sound(replace(case, k=k), [2.0**-14, 0.2])


def test_visited_values_are_those_of_the_windows() -> None:
    """NaN in values that a unit of queries does not visit leaves its output and dq finite."""
    case = random_case(**small(queries=330, slopes=torch.tensor([0.9, 0.7]), tolerance=1e-2))
    kept = kept_by_forward(case)[0, 0, 256:320].any(0)
    assert not bool(kept.all())
    v = case.v.clone()
    v[0, 0, ~kept] = math.nan
    results, clean = replace(case, v=v).run("triton"), case.run("triton")
    for name in ("out", "q"):
        assert torch.equal(results[name][0, 0, 256:320], clean[name][0, 0, 256:320])


def test_rows_rise_and_turn_round() -> None:
    """FIRST and LAST rise with the query, and [SINCE, UNTIL) are just the query units that visit a key unit."""
    for causal in (True, False):
        case = random_case(**small(queries=400, slopes=STEEP, causal=causal, tolerance=1e-2))
        first, last, until, since = (part[0, :, :7].long() for part in backward_windows(case))
        assert bool((first.diff(dim=1) >= 0).all())
        unit = torch.arange(7)
        visits = first[:, :, None] <= unit  # [H, query unit, key unit]
        if causal:
            assert torch.equal(visits.sum(1), until)
            continue
        assert bool((last.diff(dim=1) >= 0).all())
        visits = visits & (unit < last[:, :, None])
        inside = (unit[:, None] >= since[:, None]) & (unit[:, None] < until[:, None])
        assert torch.equal(visits, inside)


@pytest.mark.parametrize("start", [2**30 + 100, 2**31 - 1000, 2**40, -(2**30) - 100, -(2**31) - 7])
@pytest.mark.parametrize("by_row", [False, True])
def test_positions_far_from_the_keys(start: int, by_row: bool) -> None:
    """Only how far keys are from each other counts then."""
    case = random_case(**symmetric(queries=100, keys=400, slopes=torch.tensor([0.05, 1e-8]), tolerance=1e-3))
    near = replace(case, query_start=600 if start > 0 else -200)
    far = replace(case, query_start=torch.tensor([start]) if by_row else start)
    with torch.no_grad():
        torch.testing.assert_close(far.attend("triton"), near.attend("triton"), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tolerance", [5e-324, 1e-322, 1e-38])
def test_the_smallest_tolerances(tolerance: float) -> None:
    case = random_case(**small(queries=400, slopes=STEEP, tolerance=tolerance))
    exact = replace(case, tolerance=0.0).run("triton")
    for name, tensor in case.run("triton").items():
        torch.testing.assert_close(tensor, exact[name], rtol=1e-4, atol=1e-5)
