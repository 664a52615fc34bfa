"""Checks of the window of a single query with given norms (decode.py): what it says, and what attention visits."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.ops.bounds.inputs import (
    DIM,
    DIRECTION,
    along,
    assert_certified,
    assert_tight,
    blocks_of,
    by_heads,
    decoding_case,
    geometric,
    upper_norms,
)
from tests.ops.cases import left_padding
from tests.ops.certificates import FLOAT64_NOISE, shares, unvisited_mass
from tests.ops.dense import Case


def decoding() -> None:
    """One query with given norms: the geometric tail against the own key."""
    for slope, repel, tolerances in ((0.02, 400, geometric(2e-4, 8e-3, 60)), (0.05, 200, geometric(1e-7, 1e-4, 120))):
        case = decoding_case(1400, slope, repel=repel)
        assert_tight(case, [128], tolerances, at_least=0.9)
        for kind in ("blocks", "keys"):
            given = replace(case, key_norms=blocks_of(upper_norms(case.k), kind))
            assert_tight(given, [128], tolerances, at_least=0.9)
        assert_tight(replace(case, scale=-case.true_scale, k=-case.k), [128], tolerances, at_least=0.9)
        # The own key repels as well: the bound is the sum of both norms.
        opposed = decoding_case(1400, slope, own=-1.0, repel=repel)
        # Older keys are longer than near ones: the bound is the longest of all.
        longer = case.k * torch.where(torch.arange(1400) < 1400 - repel, 1.5, 1.0)[:, None]
        for kind in ("blocks", "keys", "one"):
            given = replace(case, k=longer, key_norms=blocks_of(upper_norms(longer), kind))
            assert_certified(opposed, given, blocks=[128], tolerances=tolerances[::4])


def decoding_at_every_length() -> None:
    """Lengths of 129 to 400, so that a window may start anywhere in a block; what is told, and what is visited."""
    tolerance, worst = 1e-3, 0.0
    for keys in range(129, 401):
        case = decoding_case(keys, 0.1, repel=64, tolerance=tolerance)
        told = float(shares(case, [128], [tolerance])[tolerance, 128].max())
        seen = float(unvisited_mass(case, "blocked").max()) / tolerance
        assert max(told, seen) <= 1.0 + FLOAT64_NOISE, f"{keys} keys: skipped {told}, {seen} times the tolerance"
        worst = max(worst, seen)
    assert worst >= 0.85, f"skipped only {worst} times the tolerance: too loose to tell"


def decoding_heads() -> None:
    """Heads and rows with windows of their own, groups, heads that share a window, padding that ends in a block."""
    slopes = torch.tensor([0.02, 0.05, 0.1, 0.3, 0.02, 0.6])
    sizes = (6.0, 2.0, 3.0, 9.0, 1.0, 4.0)
    heads = [decoding_case(1000, float(slope), size=size) for slope, size in zip(slopes, sizes, strict=True)]
    case = by_heads(heads)
    case = replace(case, key_norms=upper_norms(case.k))
    grouped = replace(case, k=case.k[:, ::2], v=case.v[:, ::2], key_norms=upper_norms(case.k[:, ::2]))
    rows = replace(_twice(case), slopes=torch.stack((slopes, slopes.flip(0))))
    padded = replace(rows, key_padding_mask=left_padding(1000, 700, length=1000))
    # One key head, so that no window is shared: the gentle slope comes second, and the padding ends inside a window.
    single = decoding_case(1000, 0.02)
    two = replace(by_heads([single, single]), slopes=torch.tensor([0.6, 0.02]))
    group = replace(two, k=single.k, v=single.v, key_norms=single.key_norms)
    by_row = replace(_twice(single), slopes=torch.tensor([[0.6], [0.02]]))
    unlike = replace(by_row, key_padding_mask=left_padding(1000, 990, length=1000))
    gentle = replace(
        _twice(single), slopes=torch.tensor([1e-3]), key_padding_mask=left_padding(1000, 700, length=1000)
    )
    for each in (case, grouped, rows, padded, group, by_row, unlike, gentle):
        for tolerance in geometric(1e-3, 0.3, 4):
            told = float(shares(each, [128], [tolerance])[tolerance, 128].max())
            for recording in (False, True):
                mass = unvisited_mass(replace(each, tolerance=tolerance), "blocked", recording=recording)
                worst = max(told, float(mass.max()) / tolerance)
                assert worst <= 1.0 + FLOAT64_NOISE, f"skipped {worst} times the tolerance of {tolerance}"


def _twice(case: Case) -> Case:
    """Two rows, the second with longer queries."""
    k, v, norms = (torch.cat((tensor, tensor)) for tensor in (case.k, case.v, case.key_norms))  # type: ignore[misc]
    return replace(case, q=torch.cat((case.q, 1.5 * case.q)), k=k, v=v, key_norms=norms)


def decoding_rounding() -> None:
    """Scores of millions, where the rounding of float32 is worth tenths; and squares that float32 cannot hold."""
    base = decoding_case(3000, 0.004, repel=1500)
    signs = torch.sign((base.k * DIRECTION).sum(-1))[..., None]
    for seed in range(40):
        direction = torch.nn.functional.normalize(
            torch.randn(DIM, generator=torch.Generator().manual_seed(seed)), dim=0
        )
        k, q = 1000.0 * signs * direction, (8000.0 * direction).expand_as(base.q)
        case = replace(base, k=k, q=q, key_norms=k.double().norm(dim=-1).amax(-1), scale=1.0)
        assert_certified(case, blocks=[128], tolerances=geometric(1e-3, 0.5, 12))
    for q_size, k_size, scale in ((1e-24, 1e26, 0.2), (1e17, 1e-24, 2e8)):
        case = decoding_case(1500, 0.05, own=-1.0, repel=600)
        q, k = case.q.double() / case.q.double().norm() * q_size, case.k.double() * k_size
        case = replace(case, q=q.float(), k=k.float(), scale=scale)
        norms = torch.linalg.vector_norm(case.k, dim=-1) if k_size < 1 else upper_norms(case.k)
        assert_certified(replace(case, key_norms=norms.amax(-1)), blocks=[128], tolerances=[1e-3, 0.1])


def decoding_extremes() -> None:
    """Slopes so steep that only the own key is left; scores beyond float32, for which everything is visited."""
    for slope in (1e3, 1e19):
        case = decoding_case(256, slope)
        assert_tight(case, [128], [1e-3], at_least=0.0)
        assert float(unvisited_mass(replace(case, tolerance=1e-3), "blocked").max()) <= 1e-3
    q, k = along(torch.ones(1), 1e18)[None, None], along(torch.ones(300), 1e25)[None, None]
    case = Case(q=q, k=k, v=k, slopes=torch.tensor([0.9]), scale=1e-40, key_norms=torch.full((1, 1), 2e25))
    assert int(replace(case, tolerance=0.1).windows()[0, 0, 0, 0]) == 0
    for queries in (3, 100):  # the same overflow on the way of several queries
        several = replace(case, q=q.expand(-1, -1, queries, -1), tolerance=0.1)
        assert bool((several.kept(16) | ~several.seen).all())


def decoding_decay() -> None:
    """Gates that are open but for one: all keys before it weigh as much as the bound says, if they attract at all."""
    worst = 0.0
    for fall in torch.linspace(5.0, 40.0, 141).tolist():
        one = decoding_case(1400, 0.05, repel=200, tolerance=1e-3)
        gates = torch.zeros((1, 2, 1400), dtype=torch.float64)
        gates[:, 0, 1200], gates[:, 1, 600] = -fall, -1e3
        alone = replace(one, slopes=None, log_gates=gates[:, :1])
        both = replace(by_heads([one, one]), slopes=None, log_gates=gates.flip(1))
        for case in (alone, both):
            told = float(shares(case, [128], [1e-3])[1e-3, 128].max())
            seen = float(unvisited_mass(case, "blocked").max()) / 1e-3
            assert max(told, seen) <= 1.0 + FLOAT64_NOISE, f"a fall by {fall}: skipped {told}, {seen} times too much"
            worst = max(worst, seen)
    assert worst >= 0.6, f"skipped only {worst} times the tolerance: too loose to tell"
