"""The proof step by step: every number that a window is computed from lies on the right side of its inequality.

x = s‖q‖ and the table of the tail from above, the threshold from below. Here the slack for rounding is held, term by
term: from outside one slack hides the lack of another.
"""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from tests.ops.bounds.inputs import (
    DIM,
    DIRECTION,
    along,
    blocks_of,
    by_heads,
    by_means,
    few,
    layout,
    mirrored,
    upper_norms,
)
from tests.ops.cases import random_case
from tests.ops.dense import Case, distances, scores_of
from trainshort.ops import windows as windows_module


class Ingredients:
    """What windows are computed from, caught on the way: the centre, and the arguments of each side."""

    def __init__(self, case: Case, block: int) -> None:
        self.case, self.block = case, block
        self.sides: list[tuple] = []
        self.center: Tensor | None = None

        def centered(problem):
            self.center = center_of(problem)
            return self.center

        def skippable(*arguments):
            self.sides.append(arguments)
            return real_skippable(*arguments)

        center_of, real_skippable = windows_module.center_of, windows_module._skippable
        everyone = slice(0, case.q.shape[1])
        with mock.patch.multiple(
            windows_module, center_of=centered, _skippable=skippable, promising_heads=lambda *_: everyone
        ):
            case.windows(block)
        assert self.sides

    def assert_on_the_right_side(self) -> None:
        """x from above, the table of the tail from above, the threshold from below."""
        case, block = self.case, self.block
        batch, heads, _, dim = case.q.shape
        group = heads // case.k.shape[1]
        center = torch.zeros((batch, case.k.shape[1], dim)) if self.center is None else self.center
        shifted = case.k.double() - center.double()[:, :, None]
        scores = scores_of(replace(case, k=shifted), torch.float64)[0]
        total = torch.logsumexp(scores.masked_fill(~case.seen, -math.inf), dim=-1)  # [B, H, Tq]
        norms = shifted.norm(dim=-1)
        if case.key_norms is not None:
            given = case.key_norms.double()
            norms = given[..., None].expand_as(norms) if given.dim() == 2 else given
            if norms.shape[2] < case.k.shape[2]:
                norms = norms.repeat_interleave(128, dim=2)[:, :, : case.k.shape[2]]
        norms = norms.repeat_interleave(group, dim=1)
        real = case.seen.any(2)  # [B, H, Tk]
        past = torch.atleast_2d(case.slopes).double().expand(batch, heads)
        future = past if case.future is None else torch.atleast_2d(case.future).double().expand(batch, heads)
        sights = case.sees or ("past" if case.causal else "both",) * heads
        sides = torch.tensor([2.0 if sight == "both" else 1.0 for sight in sights])[:, None]
        position, moved = next_to_the_keys(case)  # [B or 1, 1, Tq]
        total = total + torch.where(moved > 0, past[..., None] * moved, -future[..., None] * moved)
        length = -(-case.k.shape[2] // block) * block
        ways = [way for way in ("past", "future") if any(sight in (way, "both") for sight in sights)]
        for way, (tail, _, reach, edges, threshold) in zip(ways, self.sides, strict=True):
            looks = torch.tensor([sight in (way, "both") for sight in sights])
            slope = past if way == "past" else future
            exact = case.q.double().norm(dim=-1) * abs(case.true_scale)
            assert bool((reach.double() >= exact).all()), "a query counts as shorter than it is"
            assert bool((edges[..., -1:] >= reach).all()), "a query is longer than the last edge"
            assert bool((edges.diff(dim=-1) >= 0).all())
            place = position if way == "past" else length - 1 - position - case.offset
            true = math.log(case.may_skip) - torch.log(sides) + slope[..., None] * place + total
            known = torch.isfinite(threshold) & looks[:, None]
            over = (threshold - true)[known]
            noise = 1e-12 * (1.0 + (slope[..., None] * place).abs().max())
            assert over.numel() == 0 or float(over.max()) <= noise, f"the threshold is {float(over.max())} too high"
            key = torch.arange(case.k.shape[2]).double()
            for edge in edges.unbind(-1):
                weight = edge[..., None] * norms + slope[..., None] * (key if way == "past" else length - 1 - key)
                weight = weight.masked_fill(~real, -math.inf)
                if way == "future":
                    weight = torch.nn.functional.pad(weight, (0, length - len(key)), value=-math.inf).flip(-1)
                else:
                    weight = torch.nn.functional.pad(weight, (0, length - len(key)), value=-math.inf)
                sums = torch.logcumsumexp(weight, dim=-1)[:, :, block - 1 :: block]
                table = tail.table(edge[..., None])
                under = (sums - table)[looks[None].expand(batch, -1)]
                under = under[torch.isfinite(under)]
                least = 1e-12 * (1.0 + sums[torch.isfinite(sums)].abs().max())
                assert float(under.max()) <= least, f"the table is {float(under.max())} too low"


def next_to_the_keys(case: Case) -> tuple[Tensor, Tensor]:
    """Positions of queries, those beyond all keys of their row put next to them, and how far each was moved."""
    position = -distances(case)[:, None, :, 0].double()
    if case.cu_seqlens is not None:
        return position, torch.zeros_like(position)
    keys = case.k.shape[2]
    real = torch.ones((1, keys), dtype=torch.bool) if case.key_padding_mask is None else case.key_padding_mask
    first = real.int().argmax(-1).double()[:, None, None]
    near = torch.minimum(torch.maximum(position, first - 1), first + real.sum(-1)[:, None, None])
    return near, position - near


def ingredients(name: str) -> None:
    """x, the tail and the threshold of a layout, from inputs of ordinary size."""
    Ingredients(layout(name, tolerance=1e-3, dtype=torch.bfloat16), 16).assert_on_the_right_side()
    case = layout(name, tolerance=1e-3)
    for k in (case.k, case.k + 30.0 * DIRECTION):
        Ingredients(replace(case, k=k), 16).assert_on_the_right_side()
    if case.causal:
        for kind, block in (("keys", 16), ("blocks", 128), ("blocks", 16), ("one", 128), ("one", 16)):
            given = replace(case, key_norms=blocks_of(case.k.double().norm(dim=-1), kind))
            Ingredients(given, block).assert_on_the_right_side()


def ingredients_large() -> None:
    """Scores in the thousands and slopes in the hundreds: the slack for rounding is worth something."""
    generator = torch.Generator().manual_seed(0)
    for seed, (loud, slopes) in enumerate(
        ((1e3, (0.9, 0.3, 0.1)), (3e4, (0.9, 0.3, 0.1)), (1.0, (300.0, 40.0, 5.0)))
    ):
        for features in ({}, {"causal": False}):
            case = random_case(
                queries=330, dim=DIM, slopes=torch.tensor(slopes), seed=seed, tolerance=1e-3, **features
            )
            wiggle = 1.0 + 1e-3 * torch.randn(case.k.shape, generator=generator)
            for k in (case.k, wiggle * DIRECTION, wiggle * DIRECTION + 3.0 * torch.randn(DIM, generator=generator)):
                for q in (loud * case.q, loud * DIRECTION * wiggle):
                    for block in (16, 128):
                        Ingredients(replace(case, k=k, q=q), block).assert_on_the_right_side()
    # Gentle slopes and keys that weigh alike: Jensen's inequality is an equation, and the near score all that counts.
    for run in (32, 256):
        gentle = by_heads([by_means(run, slope, size=20.0) for slope in (1e-3, 1e-4, 1e-5)])
        gentle = replace(gentle, tolerance=1e-3, k=gentle.k.masked_fill(torch.arange(1400)[:, None] < 1000, 0.0))
        gentle = replace(gentle, k=torch.where(gentle.k == 0.0, -along(torch.ones(1400)), gentle.k))
        Ingredients(gentle, 16).assert_on_the_right_side()
        for sees in (None, ("future",) * 3):
            ahead = replace(mirrored(gentle), causal=False, sees=sees, offset=1.0)
            Ingredients(ahead, 16).assert_on_the_right_side()
    # Queries far behind the last key: the penalty has more digits than a float32.
    beyond = replace(
        by_heads([few(slope) for slope in (0.31, 0.37, 0.29, 0.41)]), tolerance=1e-9, query_start=100_003
    )
    Ingredients(beyond, 16).assert_on_the_right_side()
    # Keys that undo a steep penalty inside a block: every term of its sum is as large as the last.
    ramp = torch.arange(330, 0, -1).float()[:, None] * DIRECTION
    case = random_case(queries=330, dim=DIM, slopes=torch.tensor([100.0, 30.0, 7.0]), tolerance=1e-3, scale=1.0)
    q = (case.slopes[:, None, None] * DIRECTION).expand(2, 3, 330, DIM)
    Ingredients(replace(case, q=q, k=ramp.expand_as(case.k)), 128).assert_on_the_right_side()


def rounding() -> None:
    """Scores of ten thousand that Jensen's inequality meets exactly: what float32 rounds up must be taken off."""
    generator = torch.Generator().manual_seed(0)
    heads, keys = 12, 330
    direction = torch.nn.functional.normalize(torch.randn((1, heads, 1, DIM), generator=generator), dim=-1)
    shift = torch.nn.functional.normalize(torch.randn((1, heads, 1, DIM), generator=generator), dim=-1)
    signs = torch.where(torch.arange(keys) >= keys - 33, 1.0, -1.0)[:, None]
    signs[-1], signs[0] = -1.0, 0.0  # the own key is not among those that vouch, and one key is short
    for size, common in ((1e4, 0.0), (10.0, 1e3), (1e3, 30.0)):
        k = signs * direction + common * shift
        q = (size * DIM**0.5 * direction).expand(-1, -1, 65, -1)
        for slope in (1e-3, 1e-5):
            case = Case(q=q, k=k, v=k, slopes=torch.full((heads,), slope), tolerance=1e-3)
            for few_or_many in (case, replace(case, q=q[:, :, :5])):
                Ingredients(few_or_many, 16).assert_on_the_right_side()
            Ingredients(replace(case, key_norms=k.double().norm(dim=-1)), 16).assert_on_the_right_side()
            by_block = blocks_of(k.double().norm(dim=-1), "blocks")
            Ingredients(replace(case, key_norms=by_block), 128).assert_on_the_right_side()


def long_sequences() -> None:
    """Positions, and sums over many keys, have more digits than a float32."""
    case = replace(by_heads([few(slope, keys=20_000) for slope in (0.31, 0.37, 0.29, 0.41)]), tolerance=1e-9)
    Ingredients(case, 128).assert_on_the_right_side()
    Ingredients(replace(mirrored(case), causal=False, sees=("future",) * 4), 16).assert_on_the_right_side()
    keys, heads = 65_537, 8
    direction = torch.nn.functional.normalize(
        torch.randn((1, heads, 1, DIM), generator=torch.Generator().manual_seed(0)), dim=-1
    )
    signs = torch.where(torch.arange(keys) >= keys - 33, 1.0, -1.0)[:, None]
    signs[-1] = -1.0
    k = signs * direction
    q = 1e4 * direction * (torch.arange(keys) == keys - 1)[:, None]
    case = Case(q=q, k=k, v=k, slopes=torch.full((heads,), 1e-3), tolerance=1e-3, key_norms=upper_norms(k))
    threshold = Ingredients(case, 128).sides[0][-1][..., -1]  # of the last query, [1, H]
    last = replace(case, q=q[:, :, -1:])
    true = math.log(1e-3) + 1e-3 * (keys - 1) + torch.logsumexp(scores_of(last, torch.float64)[0], dim=-1)[..., 0]
    assert bool((threshold <= true).all()), f"the threshold is {float((threshold - true).max())} too high"


def ingredients_tiny() -> None:
    """Squares below what float32 holds, of queries, of keys, of given norms, made up for by the scale."""
    sizes = [(1e-25, 1e12, 1e13), (1e12, 1e-25, 1e13), (1e-22, 1e-18, 1e37)]
    for q_size, k_size, scale in sizes:
        _assert_tiny(q_size, k_size, scale)
    for scale in (1e-40, 1.1e-42, 2.3e-43):  # a scale of which float32 holds a few bits
        case = replace(layout("few", tolerance=1e-3), scale=scale)
        case = replace(case, q=1e18 * case.q, k=1e22 * case.k)
        Ingredients(replace(case, key_norms=case.k.double().norm(dim=-1)), 16).assert_on_the_right_side()
    try:  # where numbers below 2^-126 count as zero, squares are lost much earlier
        if torch.set_flush_denormal(True):
            _assert_tiny(5e-20, 1e12, 1e8)
            _assert_tiny(1e12, 5e-20, 1e8)
    finally:
        torch.set_flush_denormal(False)


def _assert_tiny(q_size: float, k_size: float, scale: float) -> None:
    case = random_case(queries=330, dim=DIM, slopes=torch.tensor([0.9, 0.3, 0.1]), tolerance=1e-3)
    case = replace(case, q=q_size * case.q, k=k_size * case.k, scale=scale)
    Ingredients(case, 16).assert_on_the_right_side()
    lost = torch.linalg.vector_norm(case.k, dim=-1)  # as a caller's float32 would have it
    for kind, block in (("keys", 16), ("blocks", 128)):
        sides = Ingredients(replace(case, key_norms=blocks_of(lost, kind)), block)
        sides.case = replace(case, key_norms=blocks_of(case.k.double().norm(dim=-1), kind))
        sides.assert_on_the_right_side()
