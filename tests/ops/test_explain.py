"""`ts.explain`: which path computes a call, why not the others, and what share of the keys it visits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import trainshort as ts
from trainshort.ops.dispatch import PATHS


def tensors(length: int, queries: int | None = None, heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    sizes = (queries or length, length, length)
    return [torch.randn(1, heads, size, 16, generator=generator) for size in sizes]


STEEP = ts.LinearBias(torch.tensor([0.9, 0.5, 0.3, 0.2]))


def test_windows() -> None:
    q, k, v = tensors(2048)
    found = ts.explain(q, k, v, bias=STEEP)
    windows = ts.certified_windows(q, k, bias=STEEP)
    visited = int((windows[..., 1] - windows[..., 0]).sum()) / (4 * sum(range(1, 17)))
    assert (found.backend, found.path) == ("blocked", "blocked")
    assert found.keys_visited == pytest.approx(visited)
    assert found.keys_visited < 0.5
    assert set(found.why_not) == {path.name for path in PATHS} - {"blocked"}


def test_windows_of_powers() -> None:
    q, k, v = tensors(4096)
    strengths, exponents = torch.tensor([0.1, 0.5, 1.0, 0.01]), torch.tensor([1.5, 1.0, 0.9, 2.0])
    assert ts.explain(q, k, v, bias=ts.KerpleBias(strengths, exponents, logarithmic=False)).keys_visited < 0.25
    assert ts.explain(q, k, v, bias=ts.KerpleBias(strengths, exponents)).keys_visited == 1.0
    both = ts.explain(q, k, v, bias=ts.KerpleBias(strengths, exponents, logarithmic=False), causal=False)
    assert both.keys_visited < 0.25


def test_everything() -> None:
    q, k, v = tensors(2048)
    assert ts.explain(q, k, v, bias=STEEP, tolerance=0.0).keys_visited == 1.0
    assert ts.explain(q, k, v, bias=STEEP, backend="reference").keys_visited == 1.0
    assert ts.explain(q, k, v, bias=ts.BucketBias(torch.zeros(32, 4))).keys_visited == 1.0


def test_torchs_own_kernels() -> None:
    q, k, v = tensors(64)
    found = ts.explain(q, k, v)
    assert (found.backend, found.path) == ("sdpa", "sdpa")
    assert found.why_not["blocked"] == "sdpa comes first"
    assert ts.explain(q, k, v, backend="blocked").why_not["sdpa"] == "backend='blocked' does not choose it"


def test_decoding() -> None:
    q, k, v = tensors(4096, queries=1)
    norms = k.norm(dim=-1).amax(-1) * 1.001
    found = ts.explain(q, k, v, bias=STEEP, key_norms=norms)
    assert found.path == "blocked decoding"
    assert found.keys_visited < 0.1
    without = ts.explain(q, k, v, bias=STEEP)
    assert without.path == "blocked"
    assert without.why_not["blocked decoding"] == "it needs key_norms"
    learning = ts.explain(q.requires_grad_(), k, v, bias=STEEP, key_norms=norms)
    assert "forward only" in learning.why_not["blocked decoding"]


def test_text() -> None:
    text = str(ts.explain(*tensors(300), bias=STEEP))
    assert text.splitlines()[0] == "computed by: blocked"
    assert "not triton: it needs CUDA tensors, got q on cpu" in text


def test_errors() -> None:
    q, k, v = tensors(16)
    with pytest.raises(ValueError, match="backend must be one of"):
        ts.explain(q, k, v, backend="fast")
    with pytest.raises(ValueError, match="slopes must be 0 or positive"):
        ts.explain(q, k, v, bias=ts.LinearBias(-torch.ones(4)))
    with pytest.raises(TypeError, match="window"):
        ts.explain(q, k, v, window=3)
    with pytest.raises(RuntimeError, match="backend 'triton' needs"):
        ts.explain(q, k, v, backend="triton")
