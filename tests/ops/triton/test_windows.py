"""The kernels' windows, beyond the contract: what `certified_blocks` says of them, and how they are kept."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.contract.places import PLACES
from tests.ops.contract.test_windows import LAYOUTS
from tests.ops.dense import Case, dense
from tests.ops.triton.interpreter import backward_windows, kept_by_both, kept_by_forward, problem_of

PLACE = PLACES["interpreted"]


def layout_case(name: str, **more: Any) -> Case:
    return PLACE.case(**{"queries": 400, "slopes": PLACE.steep} | LAYOUTS[name](PLACE, 400) | more)


def missed(case: Case, kept: Tensor) -> Tensor:
    """The softmax mass of each query outside a set of pairs, [B, H, Tq]."""
    return dense(case)[1].masked_fill(kept, 0.0).sum(-1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_but_what_is_not_finite(value: float) -> None:
    case = PLACE.case(queries=300, slopes=PLACE.steep)
    for name in ("q", "k"):
        bad = replace(case, **{name: torch.full_like(getattr(case, name), value)})
        for kept in kept_by_both(bad):
            assert bool((kept | ~bad.seen).all())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "packed" not in name])
def test_certified_blocks_hold_what_the_kernels_visit(layout: str) -> None:
    case = layout_case(layout, tolerance=1e-2)
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

    packed = layout_case("packed")
    assert launch.certified_blocks(problem_of(packed), 128) is None
    causal = layout_case("causal")
    assert launch.certified_blocks(problem_of(causal), 100) is None
    assert launch.certified_blocks(problem_of(replace(causal, tolerance=0.0)), 128) is None


def test_windows_are_small_where_they_should_be() -> None:
    """A bound that is safe because it visits everything is of no use."""
    for causal in (True, False):
        case = PLACE.case(queries=400, dim=64, slopes=torch.tensor([0.9, 0.7]), causal=causal)
        kept = kept_by_forward(case) & case.seen
        assert float(kept.sum()) < 0.75 * float(case.seen.sum())
        assert int(kept.sum(-1).max()) <= (256 if causal else 384)


@pytest.mark.slow
def test_what_mattered_is_less_than_what_could() -> None:
    for causal in (True, False):
        about = {"dim": 64, "slopes": torch.tensor([0.15, 0.1]), "causal": causal, "tolerance": 2.0**-14}
        case = PLACE.case(queries=600, **about)
        could, did = (kept & case.seen for kept in kept_by_both(case))
        assert float(did.sum()) < 0.85 * float(could.sum())
        assert not bool((did & ~could).any())


def test_visited_values_are_those_of_the_windows() -> None:
    """NaN in values that a unit of queries does not visit leaves its output and dq finite."""
    case = PLACE.case(queries=330, slopes=torch.tensor([0.9, 0.7]), tolerance=1e-2)
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
        case = PLACE.case(queries=400, slopes=PLACE.steep, causal=causal, tolerance=1e-2)
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
    case = PLACE.case(causal=False, queries=100, keys=400, slopes=torch.tensor([0.05, 1e-8]), tolerance=1e-3)
    near = replace(case, query_start=600 if start > 0 else -200)
    far = replace(case, query_start=torch.tensor([start]) if by_row else start)
    with torch.no_grad():
        torch.testing.assert_close(far.attend("triton"), near.attend("triton"), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", [5e-324, 1e-322, 1e-38])
def test_the_smallest_tolerances(tolerance: float) -> None:
    case = PLACE.case(queries=400, slopes=PLACE.steep, tolerance=tolerance)
    exact = replace(case, tolerance=0.0).run("triton")
    for name, tensor in case.run("triton").items():
        torch.testing.assert_close(tensor, exact[name], rtol=1e-4, atol=1e-5)
