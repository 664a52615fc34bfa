"""The table of evicted keys bounds what they could weigh, for every query, however they were evicted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainshort.ops.evicted import NOTHING, POINTS, EvictedKeys

SLOPES = (2.0**-8, 0.01, 0.3, 2.0, 40.0)


def true_sum(norms: Tensor, x: float, slope: float, last: int) -> float:
    """ln of the sum over keys of exp(x norm - slope distance), in float64."""
    distance = last - torch.arange(len(norms), dtype=torch.float64)
    return float(torch.logsumexp(x * norms.double() - slope * distance, 0))


def doubles(shape: tuple[int, ...], value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def some_norms(kind: str, count: int, size: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(count, generator=generator)
    shapes = {
        "alike": 1.0 + 0.01 * noise,
        "various": 2.0 * noise,
        "growing": torch.linspace(0.0, 2.0, count),
        "fading": torch.linspace(2.0, 0.0, count),
        "outliers": torch.where(noise > 0.98, 30.0, 1.0),
        "zero": torch.zeros(count),
    }
    return (size * shapes[kind]).float()


def evict_all(tables: EvictedKeys, norms: Tensor, slope: float, capacity: int, cuts: list[int]) -> None:
    """All keys go through a ring of this capacity, in pieces; a piece of one is a step."""
    start = 0
    for cut in cuts:
        low, end = max(0, start - capacity), start + cut
        gone = max(0, end - capacity) - low
        if cut == 1:
            evicted = norms[start - capacity] if start >= capacity else norms[0] * 0
            shape = tables.end.shape
            penalty = slope * capacity if start >= capacity else float("inf")
            tables.step(evicted.expand(shape), doubles(shape, penalty), doubles((1,), slope))
        else:
            tables.fade(0, doubles((1,), slope * cut))
            if gone > 0:
                distance = (end - 1 - low) - torch.arange(gone, dtype=torch.float64)
                tables.add(0, slice(0, 1), norms[None, None, low : low + gone], (slope * distance)[None, None])
        start = end


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["alike", "various", "growing", "fading", "outliers", "zero"]),
    size=st.sampled_from([1e-6, 0.1, 1.0, 30.0, 1e4]),
    slope=st.sampled_from(SLOPES),
    capacity=st.sampled_from([1, 7, 64]),
    cuts=st.lists(st.sampled_from([1, 1, 1, 2, 30, 100]), min_size=1, max_size=60),
    end=st.sampled_from([1e-3, 1.0, 20.0]),
    shares=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=8),
    seed=st.integers(0, 100),
)
def test_the_table_bounds_the_sum(
    kind: str,
    size: float,
    slope: float,
    capacity: int,
    cuts: list[int],
    end: float,
    shares: list[float],
    seed: int,
) -> None:
    count = sum(cuts)
    norms = some_norms(kind, count, size, seed)
    tables = EvictedKeys(1, 1, 1)
    tables.end.fill_(end)
    evict_all(tables, norms, slope, capacity, cuts)
    gone = max(0, count - capacity)
    longest = norms.amax().reshape(1, 1, 1)
    xs = torch.tensor([[[[end * share for share in shares]]]], dtype=torch.float64)
    bounds = tables.at(xs, longest).flatten()
    for x, bound in zip(xs.flatten().tolist(), bounds.tolist(), strict=True):
        if gone == 0:
            assert bound < NOTHING / 2
            continue
        truth = true_sum(norms[:gone], x, slope, count - 1)
        assert bound >= truth
        # And not by much: by the chord, or beyond the end by what the longest key could add.
        loose = true_sum(norms[:gone], end, slope, count - 1) if x > end else truth
        width = end / (POINTS - 1) if x <= end else x - end
        assert bound <= loose + width * float(norms[:gone].amax() if x <= end else longest) + 1e-6 * (1 + abs(loose))


def test_between_its_points_the_chord_is_used() -> None:
    """Two kinds of keys, where the sum is far from a straight line: no bound below the chord would be proved."""
    tables = EvictedKeys(1, 1, 1)
    tables.end.fill_(15.0)
    norms = torch.tensor([[[10.0, 1.0]]])
    tables.add(0, slice(0, 1), norms, torch.tensor([[[6.0, 0.0]]], dtype=torch.float64))
    points = tables.at(tables.points(), torch.full((1, 1, 1), 10.0)).flatten()
    middle = tables.at(tables.points() + 0.5, torch.full((1, 1, 1), 10.0)).flatten()
    torch.testing.assert_close(middle[:-1], (points[1:] + points[:-1]) / 2)
    torch.testing.assert_close(middle[-1], points[-1] + 0.5 * 10.0)


def test_tables_can_be_stretched() -> None:
    norms = some_norms("various", 500, 2.0, 0)
    tables = EvictedKeys(1, 1, 1)
    evict_all(tables, norms, 0.02, 10, [100] * 5)
    longest = norms.amax().reshape(1, 1)
    tables.stretch(0, torch.full((1, 1), 40.0, dtype=torch.float64), longest)
    for x in torch.linspace(0.0, 60.0, 50).tolist():
        bound = float(tables.at(torch.full((1, 1, 1, 1), x, dtype=torch.float64), longest[None]))
        assert bound >= true_sum(norms[:490], x, 0.02, 499)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_never_certified(bad: float) -> None:
    fine, longest = torch.ones((1, 1, 1)), torch.ones((1, 1, 1))

    def bound(norm: float, x: float, most: Tensor) -> float:
        tables = EvictedKeys(1, 1, 1)
        tables.step(fine * norm, doubles((1, 1, 1), 2.0), doubles((1,), 0.5))
        tables.step(fine, doubles((1, 1, 1), 2.0), doubles((1,), 0.5))
        return float(tables.at(torch.full((1, 1, 1, 1), x, dtype=torch.float64), most))

    assert bound(1.0, 1.0, longest) <= 0.0
    assert not bound(bad, 0.5, longest) <= 0.0
    assert not bound(1.0, bad, longest) <= 0.0
    assert not bound(1.0, 0.5, longest * bad) <= 0.0
    tables = EvictedKeys(1, 1, 1)
    tables.add(
        0, slice(0, 1), torch.tensor([[[1.0, bad, 1.0]]]), torch.tensor([[[4.5, 4.0, 3.5]]], dtype=torch.float64)
    )
    assert not float(tables.at(torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64), longest)) <= 0.0


@pytest.mark.parametrize("by_step", [True, False])
def test_behind_a_border_nothing_weighs(by_step: bool) -> None:
    """Rows and heads fade each by itself; by infinity, and what was evicted is as if it had never been."""
    tables, closed = EvictedKeys(1, 2, 2), torch.tensor([[0.0, math.inf], [3.0, 0.5]], dtype=torch.float64)
    norms = torch.ones((2, 2, 5))
    tables.add(0, slice(0, 2), norms, doubles((2, 2, 5), 2.0))
    before = tables.table.clone()
    if by_step:
        tables.step(norms[None, ..., 0], doubles((1, 2, 2), math.inf), closed[None])
    else:
        tables.fade(0, closed)
    assert bool((tables.table[0, 0, 1] < NOTHING / 2).all())
    for row, head in ((0, 0), (1, 0), (1, 1)):
        found, wanted = tables.table[0, row, head], before[0, row, head] - closed[row, head]
        assert bool((found >= wanted).all())
        torch.testing.assert_close(found, wanted)
    tables.add(0, slice(0, 2), norms, doubles((2, 2, 5), math.inf))  # keys that weigh nothing
    assert bool((tables.table[0, 0, 1] < NOTHING / 2).all())
    torch.testing.assert_close(tables.table[0, 1, 1], before[0, 1, 1] - 0.5)
