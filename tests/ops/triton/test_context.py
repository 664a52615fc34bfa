"""Context parallelism over the kernels: each rank's part of a sequence drops the weights that one process drops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import trainshort as ts
from trainshort.ops.bias import Bias
from trainshort.ops.context.parallel import simulate

SPANS = [130, 90]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["slopes", "gates"])
def test_dropout(kind: str, causal: bool) -> None:
    length, dropout = sum(SPANS), {"dropout": 0.3, "seed": -(2**40) - 3}
    q = torch.randn(2, 4, length, 16, requires_grad=True)
    k, v = (torch.randn(2, 2, length, 16, requires_grad=True) for _ in range(2))
    gates = F.logsigmoid(torch.randn(2, 4, length))

    def bias(own: slice) -> Bias:
        if kind == "slopes":
            return ts.LinearBias(4 * ts.alibi_slopes(4))
        return ts.DecayBias(gates[:, :, own], None if causal else gates[:, :, own])

    expected = ts.attention(q, k, v, bias=bias(slice(None)), causal=causal, backend="reference", **dropout)
    parts = zip(*(tensor.split(SPANS, dim=2) for tensor in (q, k, v)), strict=True)
    biases = [bias(slice(0, SPANS[0])), bias(slice(SPANS[0], length))]
    outs, _ = simulate(list(parts), bias=biases, causal=causal, backend="triton", **dropout)
    out = torch.cat(outs, dim=2)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=0)
    grad = torch.randn_like(out)
    for own, other in zip(*(torch.autograd.grad(found, (q, k, v), grad) for found in (out, expected)), strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=0)
