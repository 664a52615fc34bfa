"""Numbers at the ends of their range: queries far beyond the keys, any steepness, NaN where nobody looks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.budget import Judge
from tests.ops.cases import left_padding, random_case, right_padding
from tests.ops.certificates import FLOAT64_NOISE
from tests.ops.contract.places import ON_CPU, Place, at, formats, slow_in_interpreter
from tests.ops.dense import LEAVES, Case, dense

FAR = {"thousands_and_millions": (10**3, 10**7), "any": (10**6, 10**8, 10**9, 2**40)}
STEEP = [1.0, 10.0, 100.0, 1e4, math.exp(20.0), 1e10, 2.0**64]


# Queries beyond all keys, by how far: the same case with the queries next to the keys, and how they are moved away.

BEYOND: dict[str, tuple[dict, int]] = {
    "behind": ({"query_start": 200}, 1),
    "behind_steep": ({"query_start": 200, "slopes": torch.tensor([0.9, 2.0, 40.0])}, 1),
    "behind_bucket": ({"query_start": 200 + 50, "bias": "bucket", "num_buckets": 8, "max_distance": 50}, 1),
    "behind_symmetric": ({"query_start": 200, "causal": False, "offset": 0.5}, 1),
    "in_front_symmetric": ({"query_start": -70, "causal": False}, -1),
    "in_front_one_sided": ({"query_start": -70, "causal": False, "sees": ("past", "future", "both")}, -1),
    "by_row": ({"query_start": torch.tensor([200, 230])}, 1),
    "behind_right_padding": ({"query_start": 200, "key_padding_mask": right_padding(200, 61, length=200)}, 1),
    "behind_left_padding": ({"query_start": 200, "key_padding_mask": left_padding(200, 61, length=200)}, 1),
}


def far_case(name: str, far: int, dtype: torch.dtype, queries: int = 70) -> tuple[Case, Case]:
    """A case whose queries stand `far` beyond the keys, and one of the same weights with small distances."""
    features, direction = BEYOND[name]
    near = random_case(queries=queries, keys=200, dtype=dtype, **features)
    return replace(near, query_start=near.query_start + direction * far), near


@slow_in_interpreter
@formats(torch.float32, torch.float16, torch.bfloat16)
@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.parametrize("far", FAR)
def test_queries_far_beyond_the_keys(name: str, far: str, dtype: torch.dtype, place: Place) -> None:
    """Output, gradients and skipped mass are those of queries next to the keys: a common distance changes nothing."""
    for distance in FAR[far]:
        case, near = (place.here(case) for case in far_case(name, distance, dtype))
        Judge(near).check(case.run(place.backend))
        if near.slopes is None:
            continue
        for tolerance in (2.0**-24, 2.0**-10):
            kept = replace(case, tolerance=tolerance).kept()
            missed = float(dense(near)[1].masked_fill(kept, 0.0).sum(-1).max())
            assert missed <= tolerance * (1.0 + FLOAT64_NOISE), missed / tolerance


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("slope", STEEP)
def test_steep_slopes(slope: float, causal: bool, place: Place) -> None:
    """Beside a gentle head, and with loud queries, so that scores can pay for a step or two."""
    case = place.case(batch=1, heads=2, queries=150, dim=16, causal=causal, slopes=torch.tensor([slope, 0.3]))
    place.check(replace(case, q=2.0 * case.q, offset=0.0 if causal else 0.5))


@slow_in_interpreter
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("slopes", [[0.0, 0.3, 0.0], [0.0, 0.0, 0.0], [2.0, 0.0, 1e-6]], ids=str)
def test_heads_without_a_slope_see_everything_alike(slopes: list[float], causal: bool, place: Place) -> None:
    """Beside others, of which a steep one may skip keys; some keys are long, so that their blocks stand out."""
    case = place.case(batch=1, heads=3, queries=400, dim=16, causal=causal, slopes=torch.tensor(slopes))
    k = case.k.clone()
    k[:, :, 3:9] *= 30.0
    place.check(case)
    place.check(replace(case, k=k))


@pytest.mark.parametrize("keys", [150, 700])
def test_decoding_without_a_slope(keys: int, place: Place) -> None:
    place.check(place.case(batch=2, heads=4, queries=3, keys=keys, dim=16, slopes=torch.tensor([0.0, 0.5, 0.0, 3.0])))


@at(*ON_CPU)  # on a GPU the device itself fails
@pytest.mark.parametrize("slope", [2.0**65, 1e30, math.inf, math.nan, -1e-30, -1.0])
def test_slopes_out_of_range_are_refused(slope: float, place: Place) -> None:
    case = place.case(heads=3, slopes=torch.tensor([0.5, slope, 0.1]))
    with pytest.raises(ValueError, match=r"slopes must be 0 or positive and at most 2\^64, got"):
        case.attend(place.backend)


@at(*ON_CPU)
@pytest.mark.parametrize("start", [2**63, -(2**70)])
def test_a_start_that_is_no_position(start: int, place: Place) -> None:
    with pytest.raises(ValueError, match="query_start must lie between"):
        place.case(queries=3, query_start=start).attend(place.backend)


BLIND: dict[str, dict] = {
    "left_padding": {"key_padding_mask": left_padding(150, 61, length=150)},
    "left_padding_no_key": {"key_padding_mask": left_padding(0, 30, length=150)},
    "left_padding_bucket": {"key_padding_mask": left_padding(140, 61, length=150), "bias": "bucket"},
    "left_padding_none": {"key_padding_mask": left_padding(140, 61, length=150), "bias": "none"},
    "left_padding_grouped": {
        "heads": 4,
        "kv_heads": 2,
        "key_padding_mask": left_padding(140, 61, length=150),
    },
    "more_queries_than_keys": {"keys": 90},
    "query_start": {"query_start": -40},
    "query_start_by_row": {"query_start": torch.tensor([-40, 3])},
    "one_sided_in_front": {"causal": False, "sees": ("past", "future", "both"), "query_start": -40},
    "one_sided_behind": {"causal": False, "sees": ("past", "future", "both"), "query_start": 40},
}


@slow_in_interpreter
@formats(torch.float32, torch.float16, torch.bfloat16)
@pytest.mark.parametrize("name", BLIND)
def test_what_stands_in_queries_that_see_nothing(name: str, dtype: torch.dtype, place: Place) -> None:
    """Neither NaN in such a query nor in the gradient that arrives there reaches anything."""
    case = place.case(**{"batch": 2, "heads": 3, "queries": 150, "dim": 16, "dtype": dtype} | BLIND[name])
    blind = ~case.seen.any(-1)[..., None]  # [B, H, Tq, 1]
    assert bool(blind.any())
    clean = gradients(case, place, case.upstream())
    poisoned = replace(case, q=case.q.masked_fill(blind, math.nan))
    for dirty in (
        gradients(poisoned, place, case.upstream()),
        gradients(case, place, case.upstream().masked_fill(blind, math.nan)),
        gradients(case, place, case.upstream().masked_fill(blind, math.inf)),
    ):
        for leaf, gradient in clean.items():
            assert bool(torch.isfinite(dirty[leaf]).all()), leaf
            torch.testing.assert_close(dirty[leaf], gradient, msg=lambda text, leaf=leaf: f"{leaf}: {text}")


def gradients(case: Case, place: Place, upstream: Tensor) -> dict[str, Tensor]:
    leaves = {n: getattr(case, n).detach().requires_grad_() for n in LEAVES if getattr(case, n) is not None}
    out = replace(case, **leaves).attend(place.backend)
    found = torch.autograd.grad(out, list(leaves.values()), upstream, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}


HIDDEN: dict[str, tuple[dict, slice, slice]] = {  # features, where the poison is, queries that do not see it
    "other_documents": ({"batch": 1, "cu_seqlens": torch.tensor([0, 50, 150])}, slice(0, 50), slice(50, 150)),
    "other_documents_symmetric": (
        {"batch": 1, "causal": False, "cu_seqlens": torch.tensor([0, 50, 150])},
        slice(50, 150),
        slice(0, 50),
    ),
    "after_every_query": (
        {"causal": False, "sees": ("past",) * 3, "keys": 220, "query_start": 0},
        slice(150, 220),
        slice(0, 150),
    ),
    "before_every_query": (
        {"causal": False, "sees": ("future",) * 3, "keys": 220, "query_start": 70},
        slice(0, 70),
        slice(0, 150),
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_values_that_others_do_not_see(name: str, place: Place) -> None:
    """A value that is not finite shows to those who see it and to nobody else."""
    features, poison, others = HIDDEN[name]
    case = place.case(**{"batch": 2, "heads": 3, "queries": 150, "dim": 16} | features)
    clean = case.run(place.backend)
    for leaf in ("k", "v"):
        tensor = getattr(case, leaf).clone()
        tensor[:, :, poison] = math.nan
        dirty = replace(case, **{leaf: tensor}).run(place.backend)
        for result in ("out", "q"):
            torch.testing.assert_close(dirty[result][:, :, others], clean[result][:, :, others])
