"""linear_cross_entropy on the GPU: errors of dense logits at most, the memory that is stated, and no waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trainshort as ts
from trainshort.models import loss as module

REDUCTIONS = ["mean", "sum", "none"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def inputs(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = torch.randn(rows, width, dtype=dtype, device="cuda").requires_grad_()
    weight = (3 * torch.randn(vocabulary, width, device="cuda") / width**0.5).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, dtype=dtype, device="cuda").requires_grad_()
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    targets[::7] = -100
    return hidden, weight, bias, targets


def dense(hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor, reduction: str) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, reduction=reduction)


def results(loss: Any, given: tuple[Tensor, ...], reduction: str) -> list[Tensor]:
    hidden, weight, bias, targets = given
    value = loss(hidden, weight, targets, bias=bias, reduction=reduction)
    factors = torch.linspace(0.1, 1.0, value.numel(), device="cuda") if value.dim() else 0.37
    return [value.detach(), *torch.autograd.grad((value * factors).sum(), (hidden, weight, bias))]


def assert_as_good_as_dense(given: tuple[Tensor, ...], reduction: str, loss: Any = ts.linear_cross_entropy) -> None:
    exact = *(each.detach().double().requires_grad_() for each in given[:3]), given[3]
    found, all_at_once, right = (
        results(function, tensors, reduction) for function, tensors in ((loss, given), (dense, given), (dense, exact))
    )
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(found, right, strict=True)]
    allowed = [float((one - other).norm() / other.norm()) for one, other in zip(all_at_once, right, strict=True)]
    if reduction != "none":
        # Errors of rows have either sign: that of their sum may be nothing by chance, and has the size of their norm.
        rows, right_rows = (
            dense(*tensors[:2], tensors[3], bias=tensors[2], reduction="none") for tensors in (given, exact)
        )
        allowed[0] = max(allowed[0], 2.0 * float((rows - right_rows).norm() / right_rows.sum()))
    for name, error, most in zip(("loss", "hidden", "weight", "bias"), errors, allowed, strict=True):
        assert error <= 2.0 * most + 2.0**-20, f"{name}: {error}, dense {most}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("vocabulary", [61, 50257])
def test_errors(monkeypatch: pytest.MonkeyPatch, vocabulary: int, reduction: str, dtype: torch.dtype) -> None:
    """Over many chunks, with a vocabulary that is no multiple of anything."""
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cuda", vocabulary * 150)
    assert_as_good_as_dense(inputs(1000, 96, vocabulary, dtype), reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast(monkeypatch: pytest.MonkeyPatch, reduction: str) -> None:
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cuda", 5000 * 150)
    given = inputs(1000, 96, 5000, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        assert_as_good_as_dense(given, reduction)
        found = results(ts.linear_cross_entropy, given, reduction)
    assert [each.dtype for each in found] == [torch.float32] * 4
    assert not torch.equal(found[2], found[2].bfloat16().float()), "rounded to 16 bits"


def test_compiled() -> None:
    torch.compiler.reset()
    compiled = torch.compile(ts.linear_cross_entropy, fullgraph=True)
    for reduction in REDUCTIONS:
        with torch.autocast("cuda", torch.bfloat16):
            assert_as_good_as_dense(inputs(1000, 96, 5000, torch.float32), reduction, compiled)


def test_the_largest_vocabulary() -> None:
    assert_as_good_as_dense(inputs(300, 64, 262_144, torch.bfloat16), "mean")


def test_memory() -> None:
    """65,536 tokens, width 768, vocabulary 32,768: all logits would be 4 GiB in bfloat16."""
    rows, width, vocabulary = 65536, 768, 32768
    hidden, weight, _, targets = inputs(rows, width, vocabulary, torch.float32)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        ts.linear_cross_entropy(hidden, weight, targets).backward()
    peak = torch.cuda.max_memory_allocated() - before
    logits, states, matrix = 2**28 * 2, rows * width, vocabulary * width
    allowed = logits + states * (2 + 2) + matrix * (4 + 2)  # the forward pass: logits, gradients, 16-bit copies
    assert peak <= allowed + 2**27  # what cuBLAS works in
    assert peak < rows * vocabulary * 2 / 4


def test_nothing_waits_for_the_gpu() -> None:
    hidden, weight, bias, targets = inputs(500, 64, 1000, torch.bfloat16)

    def step() -> None:
        for reduction in REDUCTIONS:
            ts.linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_target_outside_the_vocabulary_has_no_loss() -> None:
    hidden, weight, bias, targets = inputs(10, 64, 1000, torch.bfloat16)
    targets[5] = 1000
    losses = ts.linear_cross_entropy(hidden, weight, targets, bias=bias, reduction="none")
    assert losses.isnan().nonzero().flatten().tolist() == [5]
