"""Random cases of attention, and the backends that run on any CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from unittest import mock

import torch
from torch import Tensor

import trainshort as ts
from tests.ops.dense import Case

BACKENDS = ["reference", "blocked"]


@contextmanager
def windows_whatever_they_cost() -> Iterator[None]:
    """Decoding on a CPU looks for windows however few keys there are; heads share one where they are much alike."""
    from trainshort.ops.blocked import decode

    with mock.patch.multiple(decode, SEARCH=0, CALL=1024 * decode.FIXED, LANES=1):
        yield


def random_case(
    *,
    batch: int = 2,
    heads: int = 3,
    kv_heads: int | None = None,
    queries: int = 129,
    keys: int | None = None,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    bias: str = "linear",
    **features,
) -> Case:
    """Normal q, k and v. bias: "linear" or "times" (the paper's slopes unless given), "gates", "bucket", "kerple" or
    "none"."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    kv_heads = heads if kv_heads is None else kv_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, k, v = normal(batch, heads, queries, dim), *(normal(batch, kv_heads, keys, dim) for _ in range(2))
    if bias == "linear":
        features.setdefault("slopes", ts.alibi_slopes(heads))
    elif bias == "gates":
        features.setdefault("log_gates", random_gates(batch, heads, keys, seed))
        if not features.get("causal", True):
            features.setdefault("future_gates", random_gates(batch, heads, keys, seed + 1))
    elif bias == "times":
        features.setdefault("slopes", ts.alibi_slopes(heads))
        features.setdefault("times", random_times(keys, seed))
    elif bias == "bucket":
        buckets = features.pop("num_buckets", 32)
        features["table"] = torch.randn((buckets, heads), generator=generator)
    elif bias == "kerple":
        features["strengths"] = 0.05 + torch.rand(heads, generator=generator)
        features["exponents"] = 0.2 + torch.rand(heads, generator=generator)
    return Case(q=q, k=k, v=v, **features)


def random_gates(batch: int, heads: int, keys: int, seed: int = 0) -> Tensor:
    """Log gates [B, H, T] of heads that forget within a few tokens, and of others that hardly do."""
    generator = torch.Generator().manual_seed(seed + 77)
    offsets = torch.linspace(-1.0, 6.0, heads)[:, None]
    return torch.nn.functional.logsigmoid(torch.randn((batch, heads, keys), generator=generator) + offsets)


def random_times(keys: int, seed: int = 0) -> Tensor:
    """Sorted times [T] in float64, some of them equal, in the second half of 2026 and in seconds."""
    generator = torch.Generator().manual_seed(seed + 78)
    steps = torch.rand(keys, generator=generator, dtype=torch.float64) * 3
    return 1.79e9 + steps.masked_fill(steps < 0.5, 0.0).cumsum(0)


def on(device: str, case: Case) -> Case:
    """The case with all of its tensors on a device."""
    tensors = {f.name: getattr(case, f.name) for f in fields(case) if isinstance(getattr(case, f.name), Tensor)}
    return replace(case, **{name: tensor.to(device) for name, tensor in tensors.items()})


def left_padding(*real: int, length: int) -> Tensor:
    """bool [B, length]: the last `real` keys of each row are real."""
    return torch.stack([torch.arange(length) >= length - count for count in real])


def right_padding(*real: int, length: int) -> Tensor:
    """bool [B, length]: the first `real` keys of each row are real."""
    return torch.stack([torch.arange(length) < count for count in real])
