"""Numbers at the ends of their range, as checks that every backend must pass: queries far beyond the keys, slopes of
any steepness, NaN where nobody looks. Test files name the backend (and the device) and call these."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import torch
from torch import Tensor

from tests.ops.budget import Judge
from tests.ops.cases import left_padding, random_case, right_padding
from tests.ops.dense import LEAVES, Case, dense

FAR = [10**3, 10**6, 10**7, 10**8, 10**9, 2**40]
STEEP = [1.0, 10.0, 100.0, 1e4, math.exp(20.0), 1e10, 2.0**64]
FLOAT64_NOISE = 1e-9


def on(device: str, case: Case) -> Case:
    tensors = {f.name: getattr(case, f.name) for f in fields(case) if isinstance(getattr(case, f.name), Tensor)}
    return replace(case, **{name: tensor.to(device) for name, tensor in tensors.items()})


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


def check_far_queries(backend: str, name: str, far: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Output, gradients and skipped mass are those of queries next to the keys: a common distance changes nothing."""
    case, near = far_case(name, far, dtype)
    judge = Judge(near)
    judge.check({n: t.cpu() for n, t in on(device, case).run(backend).items()})
    if near.slopes is not None:
        for tolerance in (2.0**-24, 2.0**-10):
            kept = on(device, replace(case, tolerance=tolerance)).kept().cpu()
            missed = dense(near)[1].masked_fill(kept, 0.0).sum(-1)
            assert float(missed.max()) <= tolerance * (1.0 + FLOAT64_NOISE), float(missed.max()) / tolerance


def check_steep_slope(backend: str, slope: float, causal: bool, dtype: torch.dtype, device: str = "cpu") -> None:
    """Beside a gentle head, and with loud queries, so that scores can pay for a step or two."""
    case = random_case(
        batch=1, heads=2, queries=150, dim=16, dtype=dtype, causal=causal, slopes=torch.tensor([slope, 0.3])
    )
    case = replace(case, q=2.0 * case.q, offset=0.0 if causal else 0.5)
    Judge(case).check({n: t.cpu() for n, t in on(device, case).run(backend).items()})


# What stands in queries that see no key, or in the gradient that arrives there, reaches nothing.

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


def check_blind_queries(backend: str, name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    case = on(device, random_case(queries=150, dim=16, dtype=dtype, **BLIND[name]))
    blind = ~case.seen.any(-1)[..., None].to(device)  # [B, H, Tq, 1]
    assert bool(blind.any())
    clean = _gradients(case, backend, case.upstream())
    poisoned = replace(case, q=case.q.masked_fill(blind, math.nan))
    for dirty in (
        _gradients(poisoned, backend, case.upstream()),
        _gradients(case, backend, case.upstream().masked_fill(blind, math.nan)),
        _gradients(case, backend, case.upstream().masked_fill(blind, math.inf)),
    ):
        for leaf, gradient in clean.items():
            assert bool(torch.isfinite(dirty[leaf]).all()), leaf
            torch.testing.assert_close(dirty[leaf], gradient, msg=lambda text, leaf=leaf: f"{leaf}: {text}")


def _gradients(case: Case, backend: str, upstream: Tensor) -> dict[str, Tensor]:
    leaves = {n: getattr(case, n).detach().requires_grad_() for n in LEAVES if getattr(case, n) is not None}
    out = replace(case, **leaves).attend(backend)
    found = torch.autograd.grad(out, list(leaves.values()), upstream, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}


# A value that is not finite shows to those who see it and to nobody else.

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


def check_hidden_keys(backend: str, name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    features, poison, others = HIDDEN[name]
    case = on(device, random_case(queries=150, dim=16, dtype=dtype, **features))
    clean = case.run(backend)
    for leaf in ("k", "v"):
        tensor = getattr(case, leaf).clone()
        tensor[:, :, poison] = math.nan
        dirty = replace(case, **{leaf: tensor}).run(backend)
        for result in ("out", "q"):
            torch.testing.assert_close(dirty[result][:, :, others], clean[result][:, :, others])
