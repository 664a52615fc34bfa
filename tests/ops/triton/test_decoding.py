"""Decoding with the kernels: a few queries at the end of a cache, nobody recording, with every kind of norms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.ops import hostile
from tests.ops.cases import left_padding, random_case
from tests.ops.dense import Case, dense
from tests.ops.test_decoding import KINDS, assert_output_within_budget, with_norms
from tests.ops.triton.features import STEEP

MEDIUM = torch.tensor([0.25, 0.3])


CACHES: dict[str, dict] = {
    "one_key": {"keys": 1},
    "short": {"keys": 100},
    "long": {"keys": 400},
    "steep": {"keys": 400, "slopes": STEEP},
    "gentle": {"keys": 300, "slopes": torch.full((2,), 1e-3)},
    "slopes_by_row": {"batch": 2, "keys": 300, "slopes": torch.stack((STEEP, STEEP.flip(0) / 9))},
    "grouped": {"keys": 300, "heads": 4, "kv_heads": 2, "slopes": torch.tensor([0.9, 1e-3, 0.5, 0.01])},
    "one_key_head": {"keys": 300, "heads": 4, "kv_heads": 1, "slopes": torch.tensor([0.9, 0.5, 0.1, 0.7])},
    "odd_heads": {"keys": 200, "heads": 6, "kv_heads": 2},
    "padded": {"batch": 2, "keys": 300, "key_padding_mask": left_padding(300, 140, length=300)},
    "padded_steep": {
        "batch": 2,
        "keys": 300,
        "slopes": STEEP,
        "key_padding_mask": left_padding(300, 3, length=300),
    },
    "padded_on_the_right": {"batch": 2, "keys": 200, "key_padding_mask": left_padding(200, 150, length=200).flip(1)},
    "padded_away": {"batch": 2, "keys": 200, "key_padding_mask": left_padding(200, 0, length=200)},
    "start": {"keys": 300, "query_start": 299},
    "start_inside": {"keys": 300, "query_start": 201, "slopes": STEEP},
    "start_beyond": {"keys": 200, "query_start": 290, "slopes": STEEP / 10},
    "start_before": {"keys": 100, "queries": 9, "query_start": -4},
    "start_by_row": {"batch": 2, "keys": 300, "query_start": torch.tensor([299, 20]), "slopes": STEEP},
    "start_by_row_before": {"batch": 2, "keys": 300, "query_start": torch.tensor([299, -1]), "slopes": STEEP},
    "seven_queries": {"keys": 300, "queries": 7, "slopes": STEEP},
    "sixteen_queries": {"keys": 300, "queries": 16, "heads": 4, "kv_heads": 1},
    "seventeen_queries": {"keys": 200, "queries": 17},
    "bucket": {"keys": 300, "bias": "bucket"},
    "bucket_queries": {"keys": 200, "queries": 5, "heads": 4, "kv_heads": 2, "bias": "bucket", "max_distance": 60},
    "no_bias": {"keys": 300, "bias": "none"},
    "scaled_negative": {"keys": 300, "scale": -0.4, "slopes": STEEP},
    "wide_heads": {"keys": 200, "dim": 80},
    "odd_heads_dim": {"keys": 200, "dim": 24, "slopes": STEEP},
}


def cache(name: str, **more) -> Case:
    return random_case(**({"batch": 1, "heads": 2, "queries": 1, "dim": 16} | CACHES[name]), **more)


@pytest.mark.parametrize("name", CACHES)
def test_every_cache(name: str) -> None:
    for kind in KINDS:
        assert_output_within_budget(with_norms(cache(name, tolerance=1e-3), kind), "triton")
    assert_output_within_budget(with_norms(cache(name), "keys"), "triton")


@pytest.mark.parametrize("name", ["steep", "grouped", "padded", "seven_queries", "start_by_row"])
def test_float16(name: str) -> None:
    for kind in KINDS:
        assert_output_within_budget(with_norms(cache(name, dtype=torch.float16), kind), "triton")


@pytest.mark.parametrize("name", hostile.FINITE)
def test_hostile_caches(name: str) -> None:
    arguments = hostile.FINITE[name](300)
    arguments |= {n: arguments[n][-1:, ::3] for n in "qkv"}
    slopes = arguments["slopes"]
    arguments["slopes"] = slopes[-1:, ::3] if slopes.dim() == 2 else slopes[::3]
    arguments["q"] = arguments["q"][:, :, -3:]
    for tolerance in (None, 1e-2):
        for kind in ("one", "keys"):
            assert_output_within_budget(with_norms(Case(**arguments, tolerance=tolerance), kind), "triton")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_norms_that_are_not_finite_visit_everything(value: float) -> None:
    """The first value is out of the window, but its weight is no zero: it shows only if everything is visited."""
    case = with_norms(random_case(batch=1, heads=2, queries=1, keys=300, slopes=MEDIUM), "keys")
    assert case.key_norms is not None
    case.v[0, 0, 0] = math.nan
    with torch.no_grad():
        assert bool(torch.isfinite(case.attend("triton")).all())
        for place in (0, 150, 299):
            norms = case.key_norms.clone()
            norms[0, 0, place] = value
            assert bool(torch.isnan(replace(case, key_norms=norms).attend("triton")[0, 0]).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "first_key", "near_key", "own_key"])
def test_what_is_not_finite_shows(where: str, value: float) -> None:
    case = random_case(batch=1, heads=2, queries=1, keys=300, slopes=STEEP)
    place = {"first_key": 0, "near_key": 270, "own_key": 299}
    tensor = case.q if where == "q" else case.k
    tensor[0, 1, place.get(where, 0), 3] = value
    truth = dense(case)[0]
    for kind in ("none", "one", "keys"):
        with torch.no_grad():
            out = with_norms(case, kind).attend("triton")
        assert torch.equal(torch.isnan(out), torch.isnan(truth)), kind
        torch.testing.assert_close(out, truth.float(), equal_nan=True)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["padded_steep", "start_inside", "start_by_row", "padded_on_the_right"])
def test_garbage_where_nobody_looks(name: str, garbage: float) -> None:
    case = cache(name)
    hole = ~case.seen.any(2).any(1)[:, None, :, None]
    for kind in ("none", "one", "running"):
        clean = with_norms(replace(case, k=case.k.masked_fill(hole, 0.0), v=case.v.masked_fill(hole, 0.0)), kind)
        dirty = replace(clean, k=case.k.masked_fill(hole, garbage), v=case.v.masked_fill(hole, garbage))
        with torch.no_grad():
            assert torch.equal(dirty.attend("triton"), clean.attend("triton"))


def test_as_many_splits_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainshort.ops.triton import launch

    monkeypatch.setattr(launch, "MOST_SPLITS", 64)
    for kind in ("none", "keys"):
        assert_output_within_budget(with_norms(cache("steep"), kind), "triton")


def test_a_view_of_a_preallocated_cache() -> None:
    """[B, T, H, D] in memory, with room behind it."""
    case = random_case(batch=2, heads=2, queries=1, keys=200, slopes=STEEP)

    def inside(tensor):
        room = torch.full((2, 500, 2, 8), math.nan)
        room[:, :200] = tensor.transpose(1, 2)
        return room[:, :200].transpose(1, 2)

    for kind in KINDS:
        assert_output_within_budget(with_norms(replace(case, k=inside(case.k), v=inside(case.v)), kind), "triton")


def test_windows_are_used() -> None:
    """Values far out of the window may be NaN: nobody reads them."""
    case = random_case(batch=1, heads=2, queries=1, keys=300, slopes=MEDIUM)
    case.v[:, :, :64] = math.nan
    with torch.no_grad():
        for kind in ("one", "blocks", "keys", "running"):
            assert bool(torch.isfinite(with_norms(case, kind).attend("triton")).all()), kind
        assert not bool(torch.isfinite(case.attend("triton")).any())


def test_recording_takes_the_other_way_and_means_the_same() -> None:
    case = with_norms(random_case(batch=1, heads=2, queries=2, keys=200, slopes=STEEP), "one")
    with torch.no_grad():
        out = case.attend("triton")
    recorded = replace(case, q=case.q.clone().requires_grad_()).attend("triton")
    assert recorded.requires_grad
    torch.testing.assert_close(recorded.detach(), out)


def test_fewer_key_heads_of_the_same_cache() -> None:
    """Views of one cache have the same strides: what is remembered must know how many heads share a key."""
    case = random_case(batch=1, heads=4, queries=1, keys=40, slopes=torch.tensor([0.9, 0.5, 0.2, 0.1]))
    for heads in (4, 2, 1, 4):
        view = replace(case, k=case.k[:, :heads], v=case.v[:, :heads])
        assert_output_within_budget(view, "triton")


@pytest.mark.parametrize("start", [2**30 - 500, 2**30 + 100, 2**31 - 1000, 2**31 + 5, 2**40])
def test_a_position_far_beyond_the_keys(start: int) -> None:
    """Only how far keys are from each other counts then."""
    case = random_case(batch=1, heads=2, queries=1, keys=200, slopes=torch.tensor([0.05, 1e-8]))
    near = with_norms(replace(case, query_start=300), "one")
    with torch.no_grad():
        torch.testing.assert_close(replace(near, query_start=start).attend("triton"), near.attend("triton"))
