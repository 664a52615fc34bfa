"""Attention dropout on a GPU: bit by bit the weights that a CPU drops, in graphs too, and for every size of tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.ops.dense import dropout_factors

pytestmark = pytest.mark.gpu


def kept_by_kernels(seed: int | Tensor, batch: int, heads: int, length: int, dtype: torch.dtype) -> Tensor:
    """Which weights are kept, bool [B, H, T, T]: equal weights on keys whose values are unit vectors tell."""
    zeros = torch.zeros(batch, heads, length, length, dtype=dtype, device="cuda")
    values = torch.eye(length, dtype=dtype, device="cuda").expand_as(zeros)
    out = ts.attention(zeros, zeros, values, causal=False, dropout=0.25, seed=seed, backend="triton")
    return out != 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 200, 256])
@pytest.mark.parametrize("seed", [0, -1, 3**39])
def test_the_same_weights_as_on_a_cpu(seed: int, length: int, dtype: torch.dtype) -> None:
    found = kept_by_kernels(seed, 2, 3, length, dtype)
    assert torch.equal(found.cpu(), dropout_factors(seed, (2, 3, length, length), 0.25) != 0)
    last = torch.arange(9, device="cuda")[8:]  # at an address that is no multiple of 16
    assert torch.equal(kept_by_kernels(last, 1, 1, 64, dtype).cpu(), dropout_factors(8, (1, 1, 64, 64), 0.25) != 0)


def test_a_graph_reads_the_seed_anew() -> None:
    q, k, v = (torch.randn(1, 4, 1000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    seed = torch.zeros((), dtype=torch.int64, device="cuda")

    def compute() -> Tensor:
        return ts.alibi_attention(q, k, v, dropout=0.2, seed=seed)

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for number in (0, 1, 2**40):
        seed.fill_(number)
        graph.replay()
        assert torch.equal(out, ts.alibi_attention(q, k, v, dropout=0.2, seed=number))


def test_without_a_seed_the_device_draws_one() -> None:
    q, k, v = (torch.randn(1, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.manual_seed(1)
    one, two = (ts.alibi_attention(q, k, v, dropout=0.2) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(ts.alibi_attention(q, k, v, dropout=0.2), one)
    assert not torch.equal(one, two)


def test_lse_and_windows_of_a_long_row() -> None:
    """At a length where most keys are skipped, against what the float32 sum over visited keys says."""
    q, k, v = (torch.randn(1, 2, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    slopes = torch.tensor([0.5, 0.05], device="cuda")
    bias = ts.LinearBias(slopes)
    out, lse, windows = ts.attention(q, k, v, bias=bias, return_lse=True, return_windows=True)
    assert lse is not None
    assert windows is not None
    assert torch.equal(out, ts.attention(q, k, v, bias=bias))
    key = torch.arange(4096, device="cuda")
    scores = q.double() @ k.double().transpose(-2, -1) / 8
    scores += slopes.double()[:, None, None] * (key - key[:, None])
    visited = (key >= windows.first[..., None]) & (key < windows.end[..., None])
    assert float(visited.float().mean()) < 0.25
    assert bool((visited <= (key <= key[:, None])).all())
    expected = torch.logsumexp(scores.masked_fill(~visited, -torch.inf), dim=-1)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-4)
