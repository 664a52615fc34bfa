"""Inputs that leave a bound no room, one check a term of the proof: whatever weakens a term fails its check.

A bound that is loose by a factor hides errors of that factor. So these inputs are built along the proof (docs/
attention.md): skipped keys point exactly where the query does, so that Cauchy-Schwarz is an equation; the keys that
vouch for the query weigh alike, so that Jensen's inequality is one; and all keys in between repel, so that nothing else
adds to the total. What is skipped then comes close to the tolerance, and each check says how close (`at_least`).

`ingredients` looks at the proof step by step instead: every number that a window is computed from lies on the right
side of its inequality. That is where the slack for rounding is held, term by term.

`CHECKS` are run by test_bounds.py as they are, and by mutants.py against the package with an error put in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from tests.attention.cases import left_padding, random_case, right_padding
from tests.attention.certificates import FLOAT64_NOISE, assert_monotone, shares, unvisited_mass
from tests.attention.dense import Case, distances, scores_of
from trainshort.attention import windows as windows_module

DIM = 8
DIRECTION = torch.linspace(1.0, 2.0, DIM) / torch.linspace(1.0, 2.0, DIM).norm()


def geometric(low: float, high: float, count: int) -> list[float]:
    """Tolerances from low to high, evenly in their logarithm."""
    return torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64).tolist()


def assert_tight(case: Case, blocks: Sequence[int], tolerances: Sequence[float], at_least: float) -> None:
    """No query skips more than a tolerance, and in every row of heads some query skips nearly all of one."""
    most = torch.stack([share.amax((0, 2)) for share in shares(case, blocks, tolerances).values()]).amax(0)  # [H]
    assert float(most.max()) <= 1.0 + FLOAT64_NOISE, f"skipped {float(most.max())} times the tolerance"
    assert float(most.min()) >= at_least, f"skipped only {float(most.min())} times the tolerance: too loose to tell"


def assert_certified(*cases: Case, blocks: Sequence[int] = (1, 16), tolerances: Sequence[float] = (1e-4, 1e-2, 0.3)) -> None:
    """No query skips more than a tolerance, however little it is."""
    for case in cases:
        worst = max(float(share.max()) for share in shares(case, blocks, tolerances).values())
        assert worst <= 1.0 + FLOAT64_NOISE, f"skipped {worst} times the tolerance"


def along(signs: Tensor, lengths: Tensor | float = 1.0) -> Tensor:
    """Keys or queries of these signs and lengths along one direction: [..., T] -> [..., T, D]."""
    return (signs * lengths)[..., None] * DIRECTION


def ambush(
    *, queries: int, keys: int, vouching: range, repelling: range, slope: float, place: int | None = None,
    ahead: int | None = None, size: float = 6.0, **features,
) -> Case:
    """Keys at these distances before the last query vouch for it or repel it; all older ones attract it.

    Keys behind that query repel, those `ahead` of it or more attract. All other queries are zero: they want no wider
    window. place: the position of the last query, at the end of the keys if None. size: the exponent s‖q‖‖k‖.
    """  # fmt: skip
    place = keys - 1 if place is None else place
    distance = place - torch.arange(keys)
    signs = torch.ones(keys)
    signs[(distance >= repelling.start) & (distance < repelling.stop)] = -1.0
    signs[(distance < 0) & (distance > -(keys if ahead is None else ahead))] = -1.0
    signs[(distance >= vouching.start) & (distance < vouching.stop)] = 1.0
    k = along(signs)[None, None]
    q = along((torch.arange(queries) == queries - 1).float(), size * DIM**0.5)[None, None]
    features = {"query_start": place - queries + 1, "slopes": torch.tensor([slope])} | features
    return Case(q=q, k=k, v=torch.zeros_like(k), **features)


def mirrored(case: Case) -> Case:
    """The same case with past and future exchanged."""
    start = case.k.shape[2] - int(case.query_start) - case.q.shape[2]  # type: ignore[arg-type]
    return replace(case, q=case.q.flip(2), k=case.k.flip(2), query_start=start)


def by_heads(cases: Sequence[Case]) -> Case:
    """Cases of one shape as the heads of one."""
    q, k, v = (torch.cat([getattr(case, name) for case in cases], dim=1) for name in ("q", "k", "v"))
    slopes = torch.cat([case.slopes for case in cases if case.slopes is not None])
    norms = [case.key_norms for case in cases if case.key_norms is not None]
    return replace(cases[0], q=q, k=k, v=v, slopes=slopes, key_norms=torch.cat(norms, dim=1) if norms else None)


def by_means(run: int, slope: float, queries: int = 160, **features) -> Case:
    """Many queries: the mean of the `run` keys before the tile of 32 queries vouches for the last of them."""
    in_tile = (queries - 1) % 32 + 1
    return ambush(
        queries=queries, keys=1400, vouching=range(in_tile, in_tile + run), repelling=range(round(5.0 / slope)), slope=slope,
        **features,
    )  # fmt: skip


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
    """The own key, light enough to be skipped, counts on the side that a head looks to, not once more on the other."""
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


def few(slope: float = 0.3, queries: int = 1, keys: int = 400, **features) -> Case:
    """Few queries: the 64 nearest keys themselves vouch, here those at a distance of 0 to 3."""
    return ambush(queries=queries, keys=keys, vouching=range(4), repelling=range(64), slope=slope, **features)


FINE = geometric(2e-9, 4e-9, 9)  # a step is a tenth of what one key of slope 0.3 more or less makes


def nearest_keys() -> None:
    """The log-sum-exp of the nearest keys, for one and for several queries, by row, behind the keys and before them."""
    assert_tight(few(), [1], FINE, at_least=0.95)
    three = few(queries=3)
    assert_tight(replace(three, q=three.q[:, :, -1:].expand_as(three.q)), [1], FINE, at_least=0.9)
    assert_tight(by_heads([few(size=size) for size in (4.0, 6.0, 9.0)]), [1], FINE, at_least=0.9)
    last = few(keys=400)
    assert_tight(replace(last, query_start=700), [1], geometric(1e-9, 4e-9, 12), at_least=0.9)
    assert_tight(replace(last, query_start=40_000), [1], geometric(1e-9, 4e-9, 12), at_least=0.9)
    by_row = replace(last, q=last.q.expand(2, -1, -1, -1), k=last.k.expand(2, -1, -1, -1), query_start=torch.tensor([399, 380]))
    assert_tight(by_row, [1], FINE, at_least=0.9)


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


def blocks_of(norms: Tensor, kind: str) -> Tensor:
    """Norms of keys as a caller may keep them: for each key, the largest of each 128, or the largest of all."""
    if kind == "keys":
        return norms
    if kind == "one":
        return norms.amax(-1)
    missing = -norms.shape[2] % 128
    return torch.nn.functional.pad(norms, (0, missing)).unflatten(2, (-1, 128)).amax(-1)


def upper_norms(k: Tensor) -> Tensor:
    return (k.double().norm(dim=-1) * (1.0 + 2.0**-23)).float()


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
        assert_tight(replace(given, query_start=1298), blocks=[128], tolerances=geometric(1e-6, 1e-2, 40), at_least=0.0)


def decoding_case(keys: int, slope: float, size: float = 6.0, repel: int = 200, own: float = 1.0, **features) -> Case:
    """The own key aligned with the query, those before it repel, all older ones attract."""
    case = ambush(
        queries=1, keys=keys, vouching=range(1), repelling=range(repel), slope=slope, size=size, **features
    )
    k = case.k.clone()
    k[:, :, -1] *= own
    return replace(case, k=k, key_norms=upper_norms(k).amax(-1))


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
    """Lengths of 129 to 400, so that a window may start anywhere in a block; what attention visits, not what it says."""
    tolerance, worst = 1e-3, 0.0
    for keys in range(129, 401):
        case = decoding_case(keys, 0.1, repel=64, tolerance=tolerance)
        told = float(shares(case, [128], [tolerance])[tolerance, 128].max())
        seen = float(unvisited_mass(case, "blocked").max()) / tolerance
        assert max(told, seen) <= 1.0 + FLOAT64_NOISE, f"{keys} keys: skipped {told}, {seen} times the tolerance"
        worst = max(worst, seen)
    assert worst >= 0.85, f"skipped only {worst} times the tolerance: too loose to tell"


def decoding_heads() -> None:
    """Heads and rows with windows of their own, groups, heads that share one window, padding that starts in a block."""
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
    gentle = replace(_twice(single), slopes=torch.tensor([1e-3]), key_padding_mask=left_padding(1000, 700, length=1000))
    for each in (case, grouped, rows, padded, group, by_row, unlike, gentle):
        for tolerance in geometric(1e-3, 0.3, 6):
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
        direction = torch.nn.functional.normalize(torch.randn(DIM, generator=torch.Generator().manual_seed(seed)), dim=0)
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
    """Slopes so steep that only the own key is left, and scores beyond float32: everything is visited, nothing raises."""
    for slope in (1e3, 1e20):
        case = decoding_case(256, slope)
        assert_tight(case, [128], [1e-3], at_least=0.0)
        assert float(unvisited_mass(replace(case, tolerance=1e-3), "blocked").max()) <= 1e-3
    q, k = along(torch.ones(1), 1e18)[None, None], along(torch.ones(300), 1e25)[None, None]
    case = Case(q=q, k=k, v=k, slopes=torch.tensor([0.9]), scale=1e-40, key_norms=torch.full((1, 1), 2e25))
    assert int(replace(case, tolerance=0.1).windows()[0, 0, 0, 0]) == 0
    for queries in (3, 100):  # the same overflow on the way of several queries
        several = replace(case, q=q.expand(-1, -1, queries, -1), tolerance=0.1)
        assert bool((several.kept(16) | ~several.seen).all())


def quantile_edges() -> None:
    """Queries of very different lengths in one head: each is judged at an edge of the table no shorter than itself."""
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
    """Keys that a query does not see vouch for it in no way: those behind it, on the other side, and where there are none."""
    # The loud query is the first of its tile; what stands behind it in the tile attracts, what it sees repels.
    signs = torch.where(torch.arange(1400) < 1400 - 32, -1.0, 1.0)
    signs[:900] = 1.0
    q = along((torch.arange(160) == 128).float(), 6.0 * DIM**0.5)[None, None]
    tile = Case(q=q, k=along(signs)[None, None], v=q, slopes=torch.tensor([0.02]), query_start=1400 - 160)
    # A head that looks ahead, with attracting keys behind it, and the same for few queries.
    back = ambush(queries=160, keys=2400, place=1216, vouching=range(1, 300), repelling=range(1), ahead=250, slope=0.02)
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


def each_way(case: Case) -> Case:
    return replace(case, causal=False)


LAYOUTS: dict[str, dict] = {
    "causal": {"queries": 330},
    "symmetric": {"queries": 330, "causal": False},
    "one_sided": {"queries": 330, "causal": False, "sees": ("past", "future", "both")},
    "left_right": {"queries": 330, "causal": False, "future": torch.tensor([0.1, 0.9, 0.3]), "offset": 0.7},
    "packed": {"batch": 1, "queries": 330, "cu_seqlens": torch.tensor([0, 5, 5, 6, 100, 201, 202, 330])},
    "packed_symmetric": {"batch": 1, "queries": 330, "causal": False, "cu_seqlens": torch.tensor([0, 1, 190, 191, 210, 330])},
    "packed_long": {"batch": 1, "queries": 640, "cu_seqlens": torch.tensor([0, 100, 640])},
    "packed_ahead": {
        "batch": 1, "queries": 640, "cu_seqlens": torch.tensor([0, 540, 640]), "causal": False, "sees": ("future",) * 3,
    },
    "left_padded": {"queries": 330, "key_padding_mask": left_padding(330, 133, length=330)},
    "right_padded": {"queries": 330, "key_padding_mask": right_padding(330, 100, length=330)},
    "padded_symmetric": {"queries": 330, "causal": False, "key_padding_mask": left_padding(320, 100, length=330)},
    "more_queries": {"queries": 330, "keys": 200},
    "more_queries_symmetric": {"queries": 330, "keys": 200, "causal": False},
    "start": {"queries": 100, "keys": 330, "query_start": 150},
    "start_symmetric": {"queries": 100, "keys": 330, "query_start": 150, "causal": False},
    "start_by_row": {"queries": 70, "keys": 330, "query_start": torch.tensor([250, 20])},
    "start_beyond": {"queries": 70, "keys": 330, "query_start": 500},
    "grouped": {"queries": 330, "heads": 6, "kv_heads": 2, "slopes": torch.tensor([0.9, 0.3, 0.1, 0.2, 0.5, 0.05])},
    "slopes_by_row": {"queries": 330, "slopes": torch.tensor([[0.9, 0.3, 0.1], [0.05, 0.2, 0.8]])},
    "few": {"queries": 9, "keys": 330},
    "one_gentle": {"queries": 330, "heads": 6, "kv_heads": 3, "slopes": torch.tensor([1e-3, 1e-3, 0.9, 0.3, 0.1, 1e-3])},
}


def layout(name: str, **more) -> Case:
    """Random inputs; the keys of later heads are longer."""
    case = random_case(**({"slopes": torch.tensor([0.9, 0.3, 0.1]), "dim": DIM} | LAYOUTS[name] | more))
    return replace(case, k=case.k * torch.linspace(0.3, 2.0, case.k.shape[1]).to(case.k.dtype)[:, None, None])


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
        position = -distances(case)[:, None, :, 0].double()  # [B or 1, 1, Tq]
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
    for seed, (loud, slopes) in enumerate(((1e3, (0.9, 0.3, 0.1)), (3e4, (0.9, 0.3, 0.1)), (1.0, (300.0, 40.0, 5.0)))):
        for features in ({}, {"causal": False}):
            case = random_case(queries=330, dim=DIM, slopes=torch.tensor(slopes), seed=seed, tolerance=1e-3, **features)
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


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        mean_of_near_keys,
        mean_of_near_keys_ahead,
        heads_apart,
        the_side_not_looked_to,
        both_sides,
        nearest_keys,
        nearest_keys_ahead,
        norms_by_block,
        quantile_edges,
        unseen_keys,
        not_finite,
        padding_and_packing,
        decoding,
        decoding_at_every_length,
        decoding_heads,
        decoding_rounding,
        decoding_extremes,
        ingredients_large,
        rounding,
        long_sequences,
        ingredients_tiny,
    )
}
CHECKS |= {f"random {name}": partial(random_layout, name) for name in LAYOUTS}
CHECKS |= {f"ingredients {name}": partial(ingredients, name) for name in LAYOUTS}
