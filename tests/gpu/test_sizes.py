"""Large problems, each alone on the GPU: memory linear in the length, a million tokens, more than 2^31 elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.ops.dense import Case
from tests.ops.triton.rounding import KernelJudge

pytestmark = pytest.mark.alone
ROWS = 64


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("tolerance", [None, 0.0], ids=["windows", "everything"])
def test_memory_is_linear(causal: bool, tolerance: float | None) -> None:
    """Beside inputs, output and gradients: less than 3% of one length x length matrix."""
    heads, length, dim = 16, 65536, 128
    q, k, v, upstream = (normal(1, heads, length, dim, seed=seed) for seed in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    ts.alibi_attention(
        *(t[:, :, :1024] for t in leaves), causal=causal, tolerance=tolerance
    )  # compiles, keeps slopes
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = ts.alibi_attention(*leaves, causal=causal, tolerance=tolerance, backend="triton")
    gradients = torch.autograd.grad(out, leaves, upstream)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - bytes_of(out, *gradients)
    matrix = 2 * length * length
    assert extra <= 0.03 * matrix, f"{extra / 2**20:.0f} MiB, {extra / matrix:.1%} of a matrix"


def rows_case(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, first: int, causal: bool) -> Case:
    """The rows [first, first + ROWS) of one head, and the keys that they see: the same arithmetic, dense."""
    end = first + ROWS if causal else k.shape[2]
    rows = slice(first, first + ROWS)
    return Case(q=q[:, :, rows], k=k[:, :, :end], v=v[:, :, :end], slopes=slopes, query_start=first, causal=causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_a_million_tokens(causal: bool) -> None:
    """A gradient for a few rows alone: then all gradients are those of the rows, and can be had in float64."""
    heads, length, dim = 2, 2**20, 64
    q, k, v = (normal(1, heads, length, dim, seed=seed) for seed in range(3))
    slopes = ts.alibi_slopes(heads, "cuda")
    for first in (0, 300_000, length - ROWS):
        leaves = [t.clone().requires_grad_() for t in (q, k, v, slopes)]
        out = ts.alibi_attention(*leaves, causal=causal, backend="triton")
        assert bool(torch.isfinite(out).all())
        case = rows_case(q, k, v, slopes, first, causal)
        upstream = torch.zeros_like(out)
        rows, keys = slice(first, first + ROWS), case.k.shape[2]
        upstream[:, :, rows] = case.upstream()
        dq, dk, dv, dslopes = torch.autograd.grad(out, leaves, upstream)
        for gradient, inside in ((dq, rows), (dk, slice(0, keys)), (dv, slice(0, keys))):
            outside = gradient.detach().clone()
            outside[:, :, inside] = 0.0
            assert not bool(outside.any())
        results = {"out": out[:, :, rows].detach(), "q": dq[:, :, rows], "k": dk[:, :, :keys], "v": dv[:, :, :keys]}
        for head in range(heads):  # one at a time: float64 matrices of a million keys
            own = slice(head, head + 1)
            one = replace(case, q=case.q[:, own], k=case.k[:, own], v=case.v[:, own], slopes=slopes[own])
            check_rows(one, case.upstream()[:, own], {n: t[:, own] for n, t in results.items()}, dslopes[own])


def check_rows(case: Case, upstream: Tensor, results: dict[str, Tensor], dslopes: Tensor) -> None:
    class Rows(Case):
        def upstream(self) -> Tensor:
            return upstream

    case = Rows(**{name: getattr(case, name) for name in case.__dataclass_fields__})
    KernelJudge(case).check(results | {"slopes": dslopes})


def test_more_than_two_to_the_31_elements() -> None:
    batch, heads, length, dim = 2, 40, 262_144, 128
    q, k, v = (normal(batch, heads, length, dim, seed=seed) for seed in range(3))
    assert q.numel() > 2**31
    slopes = ts.alibi_slopes(heads, "cuda")
    with torch.no_grad():
        out = ts.alibi_attention(q, k, v, backend="triton")
    assert bool(torch.isfinite(out.amax()))
    for row, head in ((0, 0), (1, 7), (1, heads - 1)):
        one = [t[row : row + 1, head : head + 1] for t in (q, k, v)]
        for first in (0, length // 2 + 17, length - ROWS):
            case = rows_case(*one, slopes[head : head + 1], first, causal=True)
            judge = KernelJudge(case)
            found = out[row : row + 1, head : head + 1, first : first + ROWS]
            error = (found.double() - judge.truth["out"]).flatten(2).norm(dim=-1)
            assert bool((error <= judge.allowed["out"]).all()), (row, head, first)


def test_a_long_cache() -> None:
    """One query after a million cached keys, and its norms: only the window is read."""
    heads, length, dim = 8, 2**20, 64
    q, k, v = normal(1, heads, 1, dim), *(normal(1, heads, length, dim, seed=seed) for seed in (1, 2))
    norms = k.float().norm(dim=-1).amax(-1)
    v[:, 0, : length // 2] = torch.nan  # far out of the window of the steepest head
    with torch.no_grad():
        out = ts.alibi_attention(q, k, v, key_norms=norms, backend="triton")
    slopes = ts.alibi_slopes(heads, "cuda")
    for head in (1, heads - 1):
        one = [t[:, head : head + 1] for t in (q, k, v)]
        case = Case(q=one[0], k=one[1], v=one[2], slopes=slopes[head : head + 1])
        judge = KernelJudge(case)
        error = (out[:, head : head + 1].double() - judge.truth["out"]).flatten(2).norm(dim=-1)
        assert bool((error <= judge.allowed["out"]).all())
    assert bool(torch.isfinite(out[:, 0]).all())
