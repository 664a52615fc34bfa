"""What nobody may look at never shows: padding, the unwritten end of a cache, other documents."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.cases import left_padding, random_case, right_padding
from tests.ops.dense import Case
from tests.ops.triton.features import STEEP, bucket, small, symmetric

GARBAGE = [math.nan, math.inf, 6e4]


def padded(**features) -> dict:
    return {"batch": 2, "queries": 150} | features


LEAKY: dict[str, dict] = {
    "left_padding": small(**padded(key_padding_mask=left_padding(150, 61, length=150))),
    "right_padding": small(**padded(key_padding_mask=right_padding(150, 61, length=150))),
    "right_padding_symmetric": symmetric(**padded(key_padding_mask=right_padding(140, 61, length=150))),
    "left_padding_symmetric": symmetric(**padded(key_padding_mask=left_padding(140, 0, length=150))),
    "left_padding_bucket": bucket(**padded(key_padding_mask=left_padding(140, 61, length=150))),
    "left_padding_none": small(**padded(bias="none", key_padding_mask=left_padding(140, 61, length=150))),
    "end_of_a_cache": small(queries=30, keys=190, query_start=100, slopes=STEEP),
    "end_of_a_cache_none": small(queries=30, keys=190, query_start=100, bias="none"),
    "end_of_a_cache_bucket": bucket(queries=30, keys=190, query_start=100),
    "end_of_a_cache_by_row": small(batch=2, queries=30, keys=190, query_start=torch.tensor([100, 7]), slopes=STEEP),
    "end_of_a_cache_padded": small(
        batch=2,
        queries=30,
        keys=190,
        query_start=torch.tensor([100, 50]),
        slopes=STEEP,
        key_padding_mask=left_padding(190, 160, length=190),
    ),
}


def unseen(case: Case) -> Tensor:
    """Keys that no query of their row may see: bool [B, 1, Tk, 1]."""
    hole = ~case.seen.any(2).any(1)[:, None, :, None]
    assert bool(hole.any())
    return hole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("feature", LEAKY)
def test_garbage_where_nobody_looks(feature: str, dtype: torch.dtype) -> None:
    """Output and gradients as with zeros there; no gradient for what was not looked at."""
    case = random_case(**LEAKY[feature], dtype=dtype)
    hole = unseen(case)
    clean = replace(case, k=case.k.masked_fill(hole, 0.0), v=case.v.masked_fill(hole, 0.0)).run("triton")
    for garbage in GARBAGE[:1] if dtype == torch.float16 else GARBAGE[1:]:
        dirty = replace(case, k=case.k.masked_fill(hole, garbage), v=case.v.masked_fill(hole, garbage)).run("triton")
        for name, tensor in clean.items():
            assert bool(torch.isfinite(dirty[name]).all()), (name, garbage)
            torch.testing.assert_close(dirty[name], tensor, msg=lambda m, name=name: f"{name}: {m}")
        for name in ("k", "v"):
            assert not bool(dirty[name].masked_fill(~hole, 0.0).any()), name


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("garbage", GARBAGE[:2])
def test_other_documents(garbage: float, causal: bool) -> None:
    case = random_case(**small(queries=260, causal=causal, slopes=STEEP, cu_seqlens=torch.tensor([0, 70, 200, 260])))
    bad = torch.zeros(260, dtype=torch.bool)
    bad[70:200] = True
    dirty = replace(case, **{n: getattr(case, n).masked_fill(bad[:, None], garbage) for n in "kv"})
    results, clean = dirty.run("triton"), case.run("triton")
    for name in ("out", "q", "k", "v"):
        assert torch.equal(results[name][:, :, ~bad], clean[name][:, :, ~bad]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_that_see_nothing_give_zeros(dtype: torch.dtype) -> None:
    mask = left_padding(0, 70, length=140)
    results = random_case(**small(batch=2, queries=140, key_padding_mask=mask, dtype=dtype)).run("triton")
    for name in ("out", "q", "k", "v"):
        assert not bool(results[name][0].any()), name
    assert not bool(results["out"][1, :, :70].any())
    assert bool(results["out"][1, :, 70:].all(-1).any())


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_where_it_should(where: str, value: float) -> None:
    """In the head and row it stands in, for every query that sees it and for no query of another tile or row."""
    case = random_case(**small(batch=2, queries=200, slopes=STEEP))
    getattr(case, where)[1, 0, 130, 3] = value
    with torch.no_grad():
        out = case.attend("triton")
    assert bool(torch.isfinite(out[0]).all())
    assert bool(torch.isfinite(out[1, 1]).all())
    assert bool(torch.isfinite(out[1, 0, :128]).all())
    if where == "q":
        assert bool(torch.isnan(out[1, 0, 130]).all())
        assert bool(torch.isfinite(out[1, 0, 131:]).all())
    elif where == "v":
        assert not bool(torch.isfinite(out[1, 0, 130:135, 3]).any())
    elif math.isnan(value):
        assert bool(torch.isnan(out[1, 0, 130:]).all())


ZERO_SIZES: dict[str, dict] = {
    "no_rows": {"batch": 0, "queries": 5},
    "no_queries": {"queries": 0, "keys": 7},
    "no_keys": {"queries": 7, "keys": 0},
    "nothing": {"queries": 0},
    "no_keys_symmetric": {"queries": 7, "keys": 0, "causal": False},
    "no_documents": {"batch": 1, "queries": 0, "cu_seqlens": torch.tensor([0])},
    "only_empty_documents": {"batch": 1, "queries": 0, "cu_seqlens": torch.tensor([0, 0, 0])},
    "no_keys_padded": {"batch": 2, "queries": 3, "keys": 0, "key_padding_mask": torch.ones((2, 0), dtype=torch.bool)},
    "no_keys_bucket": {"queries": 7, "keys": 0, "bias": "bucket"},
}


@pytest.mark.parametrize("name", ZERO_SIZES)
def test_zero_sizes(name: str) -> None:
    case = random_case(**ZERO_SIZES[name])
    for tensor in case.run("triton").values():
        assert not bool(tensor.any())
    with torch.no_grad():
        out = case.attend("triton")
    assert out.shape == case.q.shape
    assert not bool(out.any())
