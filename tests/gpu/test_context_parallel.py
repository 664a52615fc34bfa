"""Context parallelism on a GPU, all ranks in one process: as exact as one process, the same bits each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trainshort as ts
from trainshort.ops.bias import Bias
from trainshort.ops.context.parallel import simulate

SPANS = [1024, 700, 0, 1348]
LENGTH = sum(SPANS)


def run(tensors: list[Tensor], grad: Tensor, biases: list[Bias], **options: Any) -> list[Tensor]:
    parts = [list(tensor.split(SPANS, dim=2)) for tensor in tensors]
    outs, _ = simulate(list(zip(*parts, strict=True)), bias=biases, **options)
    out = torch.cat(outs, dim=2)
    return [out, *torch.autograd.grad(out, tensors, grad)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["slopes", "gates"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_as_exact_as_one_process(kind: str, causal: bool, dtype: torch.dtype, dropout: float) -> None:
    heads, kv_heads, dim = 8, 4, 64
    q = torch.randn(1, heads, LENGTH, dim, dtype=dtype, device="cuda", requires_grad=True)
    k, v = (torch.randn(1, kv_heads, LENGTH, dim, dtype=dtype, device="cuda", requires_grad=True) for _ in range(2))
    gates = F.logsigmoid(torch.randn(1, heads, LENGTH, device="cuda") + 3)
    gates[:, 1, 1500] = -torch.inf
    grad = torch.randn_like(q)
    options: dict[str, Any] = {"causal": causal, "dropout": dropout, "seed": 3}

    def bias(own: slice) -> Bias:
        if kind == "slopes":
            return ts.LinearBias(ts.alibi_slopes(heads, "cuda"))
        part = gates[:, :, own]
        return ts.DecayBias(part, None if causal else part)

    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    exact = ts.attention(*wide, bias=bias(slice(None)), **options)
    exact_all = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    whole = ts.attention(q, k, v, bias=bias(slice(None)), **options)
    whole_all = [whole, *torch.autograd.grad(whole, (q, k, v), grad)]
    ends = [sum(SPANS[: rank + 1]) for rank in range(len(SPANS))]
    biases = [bias(slice(end - length, end)) for end, length in zip(ends, SPANS, strict=True)]
    found = run([q, k, v], grad, biases, **options)
    again = run([q, k, v], grad, biases, **options)
    for own, other, one, right in zip(found, again, whole_all, exact_all, strict=True):
        assert torch.equal(own, other)
        allowed = 2.0 * float((one - right).norm()) + 1e-5 * float(right.norm())
        assert float((own - right).norm()) <= allowed
