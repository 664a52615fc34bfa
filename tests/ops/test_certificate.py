"""Certified windows keep their promise: no query ever skips more softmax mass than the tolerance.

The mass is computed in float64 from the very inputs, for every query, over random, hostile and awkward cases; and
a bound that is safe because it visits everything fails here too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import trainshort as ts
from tests.ops import hostile
from tests.ops.cases import left_padding, random_case, right_padding
from tests.ops.contract.places import PLACES
from tests.ops.contract.test_windows import BLOCKS, LAYOUTS, TOLERANCES, assert_certified
from tests.ops.dense import Case, dense

STEEP = torch.tensor([0.9, 0.3, 0.1])


@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_inputs_with_different_sides(name: str) -> None:
    arguments = hostile.FINITE[name](640)
    future = arguments["slopes"].flip(-1)
    for sees in (None, ("past", "future", "both", "future")):
        assert_certified(Case(**arguments, causal=False, future=future, sees=sees, offset=0.5), blocks=[64])


TIGHT: dict[str, dict] = {
    "causal": {},
    "symmetric": {"causal": False},
    "offset": {"causal": False, "offset": 1.0},
    "past": {"causal": False, "sees": ("past",) * 3},
    "future": {"causal": False, "sees": ("future",) * 3},
    "future_offset": {"causal": False, "sees": ("future",) * 3, "offset": 1.0},
    "left_right": {"causal": False, "future": STEEP.flip(0)},
    "slopes_by_row": {"slopes": torch.stack((STEEP, STEEP.flip(0)))},
    "grouped": {"heads": 6, "kv_heads": 3, "slopes": STEEP.repeat_interleave(2)},
    "start_by_row": {"query_start": torch.tensor([300, 470])},
    "padded": {"key_padding_mask": torch.arange(600).expand(2, -1) < torch.tensor([[350], [600]])},
}


@pytest.mark.parametrize("queries", [1, 30])
@pytest.mark.parametrize("name", TIGHT)
def test_where_the_bound_is_tight(name: str, queries: int) -> None:
    """Short queries and few of them: norms cost nothing and near keys are known, so that no error can hide."""
    case = random_case(**({"queries": queries, "keys": 600, "query_start": 300, "slopes": STEEP} | TIGHT[name]))
    case = replace(case, q=1e-3 * case.q)
    assert_certified(case, blocks=[1], tolerances=[2.0**-14, 1e-2, 0.1], at_least=0.15)


@pytest.mark.parametrize("start", [0, 300, torch.tensor([130, 512])], ids=["zero", "middle", "by_row"])
@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_inputs_in_a_cache(name: str, start: int | Tensor) -> None:
    """A few queries against many keys: near keys are found in another way than along a whole sequence."""
    arguments = hostile.FINITE[name](640)
    for queries in (1, 40, 100):
        few = arguments | {"q": arguments["q"][:, :, -queries:]}
        assert_certified(Case(**few, query_start=start), blocks=[64])


@pytest.mark.parametrize("looser", [1.0, 1.7], ids=["exact", "looser"])
@pytest.mark.parametrize("name", ["normal", "outlier_key", "aligned_keys", "growing_keys", "shifted_keys", "far_key"])
def test_given_key_norms(name: str, looser: float) -> None:
    """Bounds kept beside a cache: for each key, for each block of 128, or one for all."""
    arguments = hostile.FINITE[name](640)
    norms = arguments["k"].double().norm(dim=-1).float() * (1.0 + 2.0**-22) * looser  # [B, H, Tk]
    running = norms.cummax(-1).values
    for key_norms in (norms, running, norms.unflatten(2, (5, 128)).amax(-1), running[:, :, 127::128], norms.amax(-1)):
        case = Case(**arguments, key_norms=key_norms)
        for queries in (640, 3, 1):
            few = replace(case, q=case.q[:, :, -queries:])
            assert_certified(few, blocks=[64, 128], tolerances=[2.0**-24, 1e-2])


def test_given_key_norms_narrow_the_windows() -> None:
    case = random_case(queries=2048, slopes=torch.tensor([0.9, 0.5, 0.3]))
    blind = case.windows()
    norms = case.k.norm(dim=-1)
    given_norms = replace(case, key_norms=norms).windows()
    hopeless = replace(case, key_norms=norms * 1e4).windows()
    width = [int((w[..., 1] - w[..., 0]).sum()) for w in (blind, given_norms, hopeless)]
    assert width[0] <= width[1] * 1.2
    assert width[1] <= width[0] * 1.2
    assert width[2] > 3 * width[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tolerance_zero_skips_nothing(layout: str) -> None:
    place = PLACES["blocked"]
    case = place.case(**{"queries": 600, "slopes": place.steep} | LAYOUTS[layout](place, 600) | {"tolerance": 0.0})
    for block in BLOCKS:
        assert bool((case.kept(block) | ~case.seen).all())


def test_float64_skips_nothing_by_default() -> None:
    case = random_case(queries=600, dtype=torch.float64, slopes=STEEP)
    assert bool((case.kept(16) | ~case.seen).all())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_key_norms_that_are_not_finite_skip_nothing_of_theirs(value: float) -> None:
    case = random_case(queries=600, slopes=torch.full((3,), 0.9))
    norms = case.k.norm(dim=-1)
    norms[1, 2, 5] = value
    kept = replace(case, key_norms=norms).kept(64)
    assert bool((kept | ~case.seen)[1, 2, :, 5].all())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("block", [16, 64, 128])
def test_windows_are_small_where_they_should_be(block: int, causal: bool) -> None:
    """No wider than the bound of the design with the worst that norms can say of a near key, and two blocks."""
    slopes = torch.tensor([0.9999, 0.5, 0.25])
    case = random_case(batch=1, queries=2048, dim=64, slopes=slopes, causal=causal)
    windows = case.windows(block).double()
    both = 2.0 * case.q.norm(dim=-1).amax() * case.k.norm(dim=-1).amax() * case.true_scale
    reach = (both + math.log(2.0 / case.may_skip) - torch.log1p(-torch.exp(-slopes))) / slopes  # keys, [H]
    sides = 1 if causal else 2
    allowed = sides * torch.ceil(reach.double() / block) + 2
    width = (windows[..., 1] - windows[..., 0]).amax(-1)[0]  # [H]
    assert bool((width <= allowed).all()), f"{width.tolist()} blocks, {allowed.tolist()} allowed"
    assert float(width[0]) * block <= 0.2 * 2048


@pytest.mark.parametrize("name", ["shifted_keys", "constant_keys", "zero_keys", "tiny_norms", "zero_queries"])
def test_a_common_part_of_the_keys_costs_nothing(name: str) -> None:
    """Softmax does not see what all keys share: neither may the windows. A steep head keeps two blocks."""
    case = Case(**hostile.FINITE[name](2048))
    windows = case.windows()[:, 0]
    assert int((windows[..., 1] - windows[..., 0]).max()) <= 2


def test_one_outlier_widens_only_what_it_can_reach() -> None:
    """Only queries after the outlier, in sight of it, pay; queries before it keep their small windows."""
    case = random_case(batch=1, queries=2048, slopes=torch.full((3,), 0.9))
    k = case.k.clone()
    k[:, :, 1000] *= 20.0
    windows = replace(case, k=k).windows()
    width = windows[..., 1] - windows[..., 0]
    assert int(width[:, :, :7].max()) <= 2
    assert int(width[:, :, -1].max()) <= 4


def test_a_key_10_000_back_is_visited() -> None:
    """By the one query that needs it, and by no block that does not."""
    case = Case(**hostile.far_key_10_000_back())
    windows = case.windows()[0, 0]
    length = case.k.shape[2]
    assert int(windows[-1, 0]) <= (length - 1 - 10_000) // 128
    for block in (len(windows) - 1, len(windows) // 2):
        rows = case.q[:, :, block * 128 : block * 128 + 128]
        key_block = torch.arange(length) // 128
        kept = (key_block >= windows[block, 0]) & (key_block < windows[block, 1])
        weights = dense(replace(case, q=rows, query_start=block * 128))[1]
        assert float(weights.masked_fill(kept, 0.0).sum(-1).max()) <= case.may_skip


@st.composite
def random_problems(draw) -> tuple[Case, int]:
    heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    keys = draw(st.one_of(st.integers(1, 40), st.integers(250, 700)))
    packed = draw(st.integers(0, 3)) == 0
    queries = keys if packed else draw(st.one_of(st.just(keys), st.integers(1, 500)))
    batch = 1 if packed else 2
    causal = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def slopes() -> Tensor:
        return 2.0 ** (-8.0 * torch.rand((batch, heads * group), generator=generator))

    features: dict = {"causal": causal, "slopes": slopes(), "tolerance": draw(st.sampled_from(TOLERANCES))}
    if not causal:
        features["future"] = draw(st.sampled_from([None, slopes()]))
        features["offset"] = draw(st.floats(0.0, 1.0))
        if draw(st.booleans()):
            sights = st.sampled_from(["past", "future", "both"])
            features["sees"] = [draw(sights) for _ in range(heads * group)]
    if packed:
        features["cu_seqlens"] = torch.tensor([0, *sorted(draw(st.lists(st.integers(0, keys), max_size=4))), keys])
    elif draw(st.booleans()):
        real = [draw(st.integers(0, keys)) for _ in range(batch)]
        features["key_padding_mask"] = draw(st.sampled_from([left_padding, right_padding]))(*real, length=keys)
    if not packed and draw(st.booleans()):
        features["query_start"] = torch.tensor([draw(st.integers(-20, keys + 20)) for _ in range(batch)])
    case = random_case(
        batch=batch, heads=heads * group, kv_heads=heads, queries=queries, keys=keys,
        dim=draw(st.sampled_from([1, 4, 16])), seed=draw(st.integers(0, 2**20)), **features,
    )  # fmt: skip
    stretch = 10.0 ** torch.empty((batch, heads, keys, 1)).uniform_(
        -2.0, draw(st.floats(-1.0, 2.0)), generator=generator
    )
    shift = draw(st.sampled_from([0.0, 5.0])) * torch.randn(case.k.shape[3], generator=generator)
    loud = draw(st.sampled_from([0.1, 1.0, 10.0]))
    case = replace(case, k=case.k * stretch + shift, q=case.q * loud)
    if draw(st.booleans()):
        case = replace(case, key_norms=case.k.norm(dim=-1).cummax(-1).values)
    return case, draw(st.sampled_from(BLOCKS))


@pytest.mark.slow
@settings(max_examples=250, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(problem=random_problems())
def test_random_problems(problem: tuple[Case, int]) -> None:
    case, block = problem
    assert_certified(case, blocks=[block], tolerances=[case.may_skip])


def test_paper_slopes_are_the_default() -> None:
    case = random_case(queries=1024, heads=6)
    assert torch.equal(ts.certified_windows(case.q, case.k), case.windows())
    slopes = torch.full((6,), 0.7)
    assert torch.equal(ts.certified_windows(case.q, case.k, slopes), replace(case, slopes=slopes).windows())
