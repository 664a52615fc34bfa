"""Context parallelism over the kernels: each rank's part of a sequence drops the weights that one process drops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import trainshort as ts
from trainshort.ops.bias import Bias
from trainshort.ops.context.parallel import call_maker, simulate
from trainshort.ops.context.plan import Plan, make_plan
from trainshort.ops.context.transport import Simulated

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


def plans(spans: list[int], tensors: list[torch.Tensor], backend: str, **options: object) -> list[Plan]:
    slopes = 4 * ts.alibi_slopes(tensors[0].shape[1])
    parts = zip(*(tensor.split(spans, dim=2) for tensor in tensors), strict=True)
    calls = [call_maker(*part, ts.LinearBias(slopes), backend, dict(options)) for part in parts]
    return Simulated(len(spans)).run([make_plan(rank, call, torch.device("cpu")) for rank, call in enumerate(calls)])


@pytest.mark.parametrize("kind", ["random", "common", "a key that is no number", "grouped, two rows"])
@pytest.mark.parametrize("documents", [False, True])
def test_bounds_by_kernel_prove_what_torch_proves(kind: str, documents: bool) -> None:
    """What a rank fetches may differ by a block, and what it leaves out holds less than half of the tolerance."""
    spans, tolerance = [300, 256, 0, 20, 180], 1e-2
    rows = 2 if "two rows" in kind and not documents else 1
    q = torch.randn(rows, 4, sum(spans), 16)
    k, v = (torch.randn(rows, 2 if "grouped" in kind else 4, sum(spans), 16) for _ in range(2))
    k = k + 5 * torch.randn(16) if kind == "common" else k
    options: dict[str, object] = {"tolerance": tolerance}
    if documents:
        options["cu_seqlens"] = torch.tensor([0, 100, 330, sum(spans)])
    if "no number" in kind:
        k[0, 1, 150] = math.nan
    by_kernel, by_torch = (plans(spans, [q, k, v], backend, **options) for backend in ("triton", "blocked"))
    for one, other in zip(by_kernel, by_torch, strict=True):
        assert int((one.windows - other.windows).abs().max()) <= 128
        assert one.front >= other.front - 64
    if "no number" in kind or documents:
        return
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, dim=1).mT / 4
    place = torch.arange(sum(spans))
    distance = place - place[:, None]
    scores = (scores + 4 * ts.alibi_slopes(4)[:, None, None] * distance).masked_fill(distance > 0, -math.inf)
    weights = scores.double().softmax(-1)
    skipped = 0
    for plan in by_kernel:
        own = slice(plan.spans.start, plan.spans.end)
        for row in range(rows):
            for head in range(4):
                outside = place < plan.windows[plan.spans.rank, row, head // group, 0]
                skipped += int(outside.sum())
                if own.stop > own.start:
                    assert float(weights[row, head, own][:, outside].sum(-1).max()) <= tolerance / 2
    assert skipped, "nothing was put to the test"


def test_numbers_of_keys_and_queries() -> None:
    """The kernels' numbers, beside those of float64."""
    from trainshort.ops.triton import borders

    q, k = torch.randn(1, 2, 200, 24), torch.randn(1, 1, 200, 24)
    center, slopes, x = torch.randn(1, 1, 24), torch.tensor([0.02, 1.5]), torch.tensor([[2.0, 0.7]])
    found = borders.keys(k, center, slopes, x, 3)
    norms = (k - center[:, :, None]).double().norm(dim=-1)[0, 0]
    for block, rows in enumerate((slice(0, 128), slice(128, 200))):
        away = torch.arange(rows.stop - rows.start).double().flip(0)
        assert float(found.longest[0, 0, block]) == pytest.approx(float(norms[rows].max()), rel=1e-5)
        for head in range(2):
            fade = -slopes[head].double() * away
            for numbers, own in ((found.at_zero, fade), (found.at_most, x[0, head] * norms[rows] + fade)):
                right = float(torch.logsumexp(own, 0))
                assert right <= float(numbers[0, head, block]) <= right + 1e-4 * (1 + abs(right))
    assert bool(torch.isneginf(found.at_zero[..., 2]).all()), "no keys there"
    torch.testing.assert_close(found.means[:, :, :6], k[:, :, :192].unflatten(2, (6, 32)).mean(3))
    before = torch.randn(1, 1, 8, 24)
    x, near = borders.queries(q, torch.cat((before, found.means), 2), 3, center, slopes, 0.2)
    means = torch.cat((before, k[:, :, :192].unflatten(2, (6, 32)).mean(3)), 2)[0, 0]  # [14, D]
    for tile in range(7):
        own = slice(32 * tile, min(32 * tile + 32, 200))
        for head in range(2):
            rows = q[0, head, own]
            assert float(x[0, head, tile]) == pytest.approx(0.2 * float(rows.norm(dim=-1).max()), rel=1e-4)
            bounds = [0.2 * rows @ (means[tile + 7] - center[0, 0]) + math.log(32) - slopes[head] * 16.5]
            if tile + 3 >= 8:
                mean = means[tile : tile + 8].mean(0) - center[0, 0]
                bounds.append(0.2 * rows @ mean + math.log(256) - slopes[head] * 128.5)
            assert float(near[0, head, tile]) == pytest.approx(float(torch.stack(bounds).amax(0).min()), abs=1e-3)
