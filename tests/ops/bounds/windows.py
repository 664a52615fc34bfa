"""Checks of the windows of whole sequences and of a few queries: each query's skipped mass against the tolerance."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from tests.ops.bounds.inputs import (
    DIM,
    FINE,
    along,
    ambush,
    assert_certified,
    assert_tight,
    blocks_of,
    by_heads,
    by_means,
    each_way,
    few,
    geometric,
    layout,
    mirrored,
    upper_norms,
)
from tests.ops.cases import left_padding, right_padding
from tests.ops.certificates import FLOAT64_NOISE, assert_monotone, count, shares
from tests.ops.dense import Case
from tests.ops.generators import cases


def mean_of_near_keys() -> None:
    """Jensen's bound and the tail over the norms of keys, for both runs of near keys, several sizes in one call."""
    assert_tight(by_means(32, 0.02), blocks=[1], tolerances=[3e-3, 4e-3, 1e-2], at_least=0.94)
    assert_tight(by_means(256, 0.01), blocks=[1], tolerances=[1e-3, 1e-2], at_least=0.75)
    several = by_heads([by_means(32, 0.02, size=size) for size in (4.0, 6.0, 12.0)])
    assert_tight(several, blocks=[1], tolerances=[4e-3], at_least=0.8)
    assert_tight(replace(several, scale=-several.true_scale, k=-several.k), [1], tolerances=[4e-3], at_least=0.8)


def mean_of_near_keys_ahead() -> None:
    """The mirror image: means of keys behind the tile, the offset, and heads that look one way or both."""
    for run, slope, tolerance, at_least in ((32, 0.02, 4e-3, 0.93), (256, 0.01, 1e-2, 0.7)):
        case = mirrored(by_means(run, slope, causal=False))
        one_way = replace(case, sees=("future",))
        assert_tight(one_way, blocks=[1], tolerances=[tolerance, tolerance * 1.01], at_least=at_least)
        assert_tight(replace(one_way, offset=1.0), blocks=[1], tolerances=[tolerance], at_least=at_least)
        assert_tight(case, blocks=[1], tolerances=[tolerance], at_least=at_least / 2)
        past = replace(by_means(run, slope, causal=False), sees=("past",))
        assert_tight(past, blocks=[1], tolerances=[tolerance], at_least=at_least)


def heads_apart() -> None:
    """A gentle head that is not looked at comes first: the others keep their own keys and norms."""
    gentle, steep = by_means(32, 1e-4), by_means(32, 0.02)
    case = by_heads([replace(gentle, k=1e-3 * gentle.k), steep])
    for norms in (None, upper_norms(case.k)):
        found = shares(replace(case, key_norms=norms), [1], [3e-3, 4e-3])
        most = torch.stack([share.amax((0, 2)) for share in found.values()]).amax(0)
        assert float(most[0]) == 0.0, "the gentle head was looked at"
        assert 0.9 <= float(most[1]) <= 1.0 + FLOAT64_NOISE, f"skipped {float(most[1])} times the tolerance"


def the_side_not_looked_to() -> None:
    """The own key, light enough to be skipped, counts on the side that a head looks to, and not once more."""
    keys, place = 1900, 500
    ahead = torch.arange(keys) - place
    signs = torch.where((ahead <= 32) | (ahead >= 250), 1.0, -1.0).masked_fill(ahead < 0, 0.0)
    q = along((torch.arange(160) == 159).float(), 6.0 * DIM**0.5)[None, None]
    for weight in (0.5, 0.55, 0.6, 0.65):
        k = along(signs.masked_fill(ahead == 0, weight))[None, None]
        case = Case(q=q, k=k, v=k, slopes=torch.tensor([0.02]), query_start=place - 159, causal=False)
        case = replace(by_heads([case, case]), sees=("future", "past"))
        case = replace(case, key_norms=upper_norms(case.k))
        other = replace(mirrored(case), key_norms=upper_norms(case.k).flip(-1), sees=("past", "future"))
        assert_certified(case, other, blocks=[1], tolerances=geometric(1e-3, 3e-2, 12))


def both_sides() -> None:
    """Keys on both sides that are skipped at once: each side has half of the tolerance, by its own slope."""
    case = ambush(
        queries=160, keys=2400, place=1216, vouching=range(32, 64), repelling=range(250), ahead=250, slope=0.02,
        causal=False,
    )  # fmt: skip
    assert_tight(case, blocks=[1], tolerances=[4e-3], at_least=0.9)
    steeper = replace(case, future=torch.tensor([0.04]))
    assert_tight(steeper, blocks=[1], tolerances=[4e-3], at_least=0.4)
    other = replace(mirrored(case), slopes=torch.tensor([0.04]), future=torch.tensor([0.02]))
    assert_tight(other, blocks=[1], tolerances=[4e-3], at_least=0.4)


def nearest_keys() -> None:
    """The log-sum-exp of the nearest keys, for one and for several queries, by row, and far behind the keys."""
    assert_tight(few(), [1], FINE, at_least=0.95)
    three = few(queries=3)
    assert_tight(replace(three, q=three.q[:, :, -1:].expand_as(three.q)), [1], FINE, at_least=0.9)
    assert_tight(by_heads([few(size=size) for size in (4.0, 6.0, 9.0)]), [1], FINE, at_least=0.9)
    last = few(keys=400)
    assert_tight(replace(last, query_start=700), [1], geometric(1e-9, 4e-9, 12), at_least=0.9)
    assert_tight(replace(last, query_start=40_000), [1], geometric(1e-9, 4e-9, 12), at_least=0.9)
    by_row = replace(
        last, q=last.q.expand(2, -1, -1, -1), k=last.k.expand(2, -1, -1, -1), query_start=torch.tensor([399, 380])
    )
    assert_tight(by_row, [1], FINE, at_least=0.9)
    # Slopes so steep that float64 cannot hold a score beside them: the own key stays.
    for slope in (2.0**50, 2.0**63):
        assert_certified(few(keys=400, slope=slope), blocks=[1, 16, 128], tolerances=[1e-3])


def nearest_keys_ahead() -> None:
    """A query that looks ahead has only its own key to vouch for it; the offset makes the next keys nearer."""
    own = ambush(
        queries=1, keys=300, place=0, vouching=range(1), repelling=range(1), ahead=30, slope=0.5, causal=False,
        sees=("future",),
    )  # fmt: skip
    steps = geometric(2e-7, 4e-7, 12)
    for offset in (0.0, 0.5, 1.0):
        assert_tight(replace(own, offset=offset), [1], steps, at_least=0.9)
    assert_tight(replace(own, sees=None, offset=1.0), [1], steps, at_least=0.45)
    assert_tight(replace(own, query_start=-50), [1], steps, at_least=0.9)
    assert_tight(replace(own, query_start=-50, offset=1.0), [1], steps, at_least=0.9)


def norms_by_block() -> None:
    """Given norms of blocks, and of a head: all keys of a block as long as the longest, a geometric series."""
    for kind in ("blocks", "one", "keys"):
        case = by_means(32, 0.02, queries=129)
        case = replace(case, key_norms=blocks_of(upper_norms(case.k), kind))
        assert_tight(case, blocks=[128], tolerances=geometric(5e-4, 8e-3, 40), at_least=0.85)
        two = by_heads([case, replace(case, q=0.5 * case.q)])
        assert_tight(two, blocks=[128], tolerances=geometric(5e-4, 8e-3, 20), at_least=0.6)
        if kind != "keys":
            assert_tight(case, blocks=[1, 16], tolerances=[4e-3], at_least=0.5)
    # Short keys in the block of a long one: a bound of a block is a bound of all of it.
    alone = few(keys=1300, slope=0.05)
    lengths = torch.where(torch.arange(1300) % 128 == 5, 1.0, 0.25)[:, None]
    alone = replace(alone, k=alone.k * lengths)
    for kind in ("blocks", "one"):
        given = replace(alone, key_norms=blocks_of(upper_norms(alone.k), kind), q=alone.q.expand(-1, -1, 2, -1))
        assert_tight(
            replace(given, query_start=1298), blocks=[128], tolerances=geometric(1e-6, 1e-2, 40), at_least=0.0
        )


def quantile_edges() -> None:
    """Queries of very different lengths in one head: each is judged at an edge no shorter than itself."""
    keys, queries = 900, 600
    base = ambush(queries=queries, keys=keys, vouching=range(33), repelling=range(100), slope=0.05)
    base = replace(base, q=base.q[:, :, -1:].expand(-1, -1, queries, -1))
    generator = torch.Generator().manual_seed(0)
    cases = []
    for loud in (1, 129, 255, 401, 599):  # every other query is in the sample: not these
        lengths = 0.05 + 0.5 * torch.rand(queries, generator=generator)
        lengths[loud] = 2.0
        lengths[(loud + 150) % queries] = 0.8
        cases.append(replace(base, q=base.q * lengths[:, None]))
    case = by_heads(cases)
    for signs in (1.0, torch.where(torch.rand((1, 5, keys, 1), generator=generator) < 0.3, 1.0, -1.0)):
        assert_certified(replace(case, k=case.k * signs), tolerances=[1e-4, 1e-2])


def unseen_keys() -> None:
    """Keys that a query does not see do not vouch for it: behind it, on the other side, or not there at all."""
    # The loud query is the first of its tile; what stands behind it in the tile attracts, what it sees repels.
    signs = torch.where(torch.arange(1400) < 1400 - 32, -1.0, 1.0)
    signs[:900] = 1.0
    q = along((torch.arange(160) == 128).float(), 6.0 * DIM**0.5)[None, None]
    tile = Case(q=q, k=along(signs)[None, None], v=q, slopes=torch.tensor([0.02]), query_start=1400 - 160)
    # A head that looks ahead, with attracting keys behind it, and the same for few queries.
    back = ambush(
        queries=160, keys=2400, place=1216, vouching=range(1, 300), repelling=range(1), ahead=250, slope=0.02
    )
    back = replace(back, causal=False, sees=("future",))
    last = replace(back, q=back.q[:, :, -1:], query_start=1216)
    # The first queries of a row, with no key at all before their tile, see one key that weighs, and their own.
    k = -along(torch.ones(160))[None, None]
    k[:, :, 0] = 0.0
    q = along((torch.arange(160) < 32).float(), 12.0 * DIM**0.5)[None, None]
    first = Case(q=q, k=k, v=k, slopes=torch.tensor([0.02]))
    first = replace(first, key_norms=upper_norms(k))  # no centre, which would make all keys but that one short
    assert_certified(
        tile, mirrored(replace(tile, causal=False, sees=("future",))), first, back, last,
        mirrored(replace(back, sees=("past",))), mirrored(replace(last, sees=("past",))),
    )  # fmt: skip


def padding_and_packing() -> None:
    """Keys that nobody sees vouch for no query: of padding on either side, and of other documents."""
    # Left: the only keys in sight are the last of the 32 before the tile, which decides, and the own, which repels.
    k = -along(torch.ones(256))[None, None]
    k[:, :, :96] = 0.0
    q = along((torch.arange(160) < 32).float(), 12.0 * DIM**0.5)[None, None]
    left = Case(q=q, k=k, v=k, slopes=torch.tensor([0.02]), key_padding_mask=left_padding(161, length=256))
    assert_certified(replace(left, key_norms=upper_norms(k)))
    # Right: queries behind the last key, which stands far before them.
    right = ambush(queries=300, keys=700, vouching=range(0), repelling=range(0), slope=0.05)
    right = replace(right, q=-0.5 * right.q[:, :, -1:].expand(-1, -1, 300, -1))
    right = replace(right, key_padding_mask=right_padding(420, length=700))
    # What stands in the padding is not in the sums of which means are differences.
    dirty = by_means(32, 0.02, queries=1216, key_padding_mask=left_padding(1300, length=1400))
    dirty = replace(dirty, k=dirty.k.index_fill(2, torch.arange(100), 1e30))
    near = torch.arange(1400)[:, None] >= 1200
    repelled = replace(dirty, k=torch.where(near, -along(torch.ones(1400)), dirty.k))
    assert_certified(repelled, blocks=[1], tolerances=[4e-3, 0.3])
    assert_tight(dirty, blocks=[1], tolerances=[4e-3], at_least=0.9)
    # Few queries: what attracts among the nearest 64 is padding.
    signs = torch.where(torch.arange(400) < 360, 1.0, -1.0)
    signs[380] = 0.0
    near = ambush(queries=1, keys=400, vouching=range(0), repelling=range(0), slope=0.02)
    near = replace(near, k=along(signs)[None, None], key_padding_mask=left_padding(30, length=400))
    # Unseen keys that are long.
    for case in (left, right, near):
        assert case.key_padding_mask is not None
        loud = replace(case, k=case.k.masked_fill(~case.key_padding_mask[:, None, :, None], 1e4))
        assert_certified(case, loud, each_way(case), each_way(loud))


def random_layout(name: str) -> None:
    """Short and long queries, with and without given norms; both borders of the windows rise with the query."""
    case = layout(name)
    given = [None] if not case.causal else [None, upper_norms(case.k), blocks_of(upper_norms(case.k), "blocks")]
    for loud in (0.01, 1.0):
        for norms in given:
            quiet = replace(case, q=loud * case.q, key_norms=norms)
            assert_certified(quiet, blocks=[1, 16, 128], tolerances=[1e-4, 0.1])
    assert_monotone(replace(case, tolerance=1e-2).windows(1))
    assert_monotone(replace(case, tolerance=1e-2).windows(16))


def not_finite() -> None:
    """A key that is not finite, or whose norm is not known, is visited by all who see it; such a query visits all."""
    for name in ("causal", "symmetric", "few"):
        case = layout(name, tolerance=1e-2)
        row, head, at = 1, 0, 20
        for value in (math.nan, math.inf):
            k, q = case.k.clone(), case.q.clone()
            k[row, head, at, 3] = q[row, head, -1, 2] = value
            missed = case.seen & ~replace(case, k=k).kept(16)
            assert not bool(missed[row, head, :, at].any()), f"{value} in a key is skipped"
            missed = case.seen & ~replace(case, q=q).kept(16)
            assert not bool(missed[row, head, -1].any()), f"{value} in a query, and it skips"
            norms = upper_norms(case.k)
            norms[row, head, at] = value
            for kind, block in (("keys", 16), ("blocks", 128), ("one", 128), ("one", 16)):
                for each in (case, replace(case, q=case.q[:, :, -1:], query_start=None)):
                    if case.causal:
                        missed = each.seen & ~replace(each, key_norms=blocks_of(norms, kind)).kept(block)
                        assert not bool(missed[row, head, :, at].any()), f"a norm of {value} is skipped"

    # Norms that overflow, seen from beyond the keys by queries to which no lower bound is known.
    case = layout("symmetric", tolerance=1e-2)
    loud = replace(case, q=1e-20 * case.q, k=1e20 * case.k)
    for start in (case.k.shape[2] + 5, -case.q.shape[2] - 5):
        beyond = replace(loud, query_start=start)
        assert not bool((beyond.seen & ~beyond.kept(16)).any()), "keys of unknown norms are skipped from beyond them"


def as_gates(case: Case) -> Case:
    """The same bias from gates, as long as the keys."""
    assert case.slopes is not None
    gates = -torch.atleast_2d(case.slopes).double()[..., None].expand(-1, -1, case.k.shape[2])
    return replace(case, slopes=None, log_gates=gates, future_gates=None if case.causal else gates)


def decay() -> None:
    """Slopes as gates come as close to the tolerance as slopes; gates and times of many kinds never beyond it."""
    assert_tight(as_gates(by_means(32, 0.02)), blocks=[1], tolerances=[4e-3, 1e-2], at_least=0.94)
    assert_tight(as_gates(by_means(256, 0.01)), blocks=[1], tolerances=[1e-3, 1e-2], at_least=0.75)
    case = as_gates(by_means(32, 0.02, queries=129))
    for kind in ("blocks", "keys"):
        given = replace(case, key_norms=blocks_of(upper_norms(case.k), kind))
        assert_tight(given, blocks=[128], tolerances=geometric(5e-4, 8e-3, 40), at_least=0.85)
    found = count(itertools.islice(cases(7, lengths=(129, 300), kinds="decay"), 40), blocks=(1, 64))
    assert found.worst <= 1.0 + FLOAT64_NOISE, f"{found}, by {found.by}"


def after_a_large_fall() -> None:
    """c falls so far at once that float64 hardly tells near keys apart, and then stays: thousands of keys weigh alike
    before one fall more, and the running sum over them must not lose any. By times, as no gate lets c fall so far."""
    keys, queries, far = 3400, 160, 3000
    zeros = torch.zeros(1, 1, keys, DIM)
    for fall in (2.0**30, 2.0**44, 2.0**47, 2.0**50):
        times = torch.zeros(keys, dtype=torch.float64)
        times[100:] = fall
        times[far:] += 20.0
        back = Case(q=zeros[:, :, :queries], k=zeros, v=zeros, times=times, slopes=torch.ones(1))
        ahead = replace(back, times=times[-1] - times.flip(0), causal=False, query_start=0)
        assert_certified(back, ahead, blocks=[1], tolerances=geometric(1e-8, 1e-6, 30))
        assert_certified(back, ahead, blocks=[128], tolerances=geometric(1e-8, 1e-6, 10))


def as_powers(case: Case, exponent: float = 1.0, at: float = 0.0) -> Case:
    """The same bias as a power of the distance; for another exponent one that costs as much at a distance."""
    assert case.slopes is not None
    strengths = case.slopes if not at else case.slopes * at ** (1.0 - exponent)
    return replace(
        case, slopes=None, strengths=strengths, exponents=torch.full_like(strengths, exponent), logarithmic=False
    )


def powers() -> None:
    """With exponents of 1 as close to the tolerance as slopes; with others the line is close somewhere, and never
    above a cost: the chord at the furthest key, the tangent where the cost is ln(1/tolerance)."""
    assert_tight(as_powers(by_means(32, 0.02)), blocks=[1], tolerances=[4e-3, 1e-2], at_least=0.94)
    assert_tight(as_powers(by_means(256, 0.01)), blocks=[1], tolerances=[1e-3, 1e-2], at_least=0.75)
    three = as_powers(few(queries=3))
    assert_tight(replace(three, q=three.q[:, :, -1:].expand_as(three.q)), [1], FINE, at_least=0.9)
    for exponent in (0.5, 0.9, 1.1, 2.0):
        case = as_powers(few(queries=2, keys=1300, slope=0.05), exponent, at=100.0)
        ahead = mirrored(replace(case, causal=False, query_start=1298))
        assert_certified(case, ahead, blocks=[1], tolerances=geometric(1e-8, 0.3, 30))
    found = count(itertools.islice(cases(7, lengths=(129, 300), kinds="power"), 40), blocks=(1, 64))
    assert found.worst <= 1.0 + FLOAT64_NOISE, f"{found}, by {found.by}"
    assert found.worst >= 0.5, f"{found}: too loose to tell anything"
