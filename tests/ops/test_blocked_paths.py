"""The short cuts of the blocked backend: short rows in one kernel call, diagonal tiles, gradients that are stored."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import trainshort as ts
from trainshort.ops import operators
from trainshort.ops.bias import Bias
from trainshort.ops.problem import make_problem


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3)]


def gradients(inputs: list[Tensor], backend: str, grad: Tensor | None = None, **about) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = ts.alibi_attention(*leaves, backend=backend, **about)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out) if grad is None else grad)]


def assert_like_reference(inputs: list[Tensor], tolerance: float = 2e-5, **about) -> None:
    found = gradients(inputs, "blocked", **about)
    exact = gradients([tensor.double() for tensor in inputs], "reference", **about)
    for one, two in zip(found, exact, strict=True):
        torch.testing.assert_close(
            one.double(), two, rtol=tolerance, atol=tolerance * max(1.0, float(two.abs().max()))
        )


@pytest.mark.parametrize("heads", [1, 6, 32])
@pytest.mark.parametrize("length", [1, 2, 31, 128, 200, 256])
def test_short_rows(length: int, heads: int) -> None:
    assert_like_reference(tensors(2, heads, length, 16))


@pytest.mark.parametrize("heads", [4, 32])
def test_layouts_that_a_compiler_is_told(heads: int) -> None:
    """More heads than one bias holds took another way, whose gradients were laid out otherwise than promised."""
    q, k, v = tensors(1, heads, 256, 16)
    problem = make_problem(q, k, v, ts.LinearBias(ts.alibi_slopes(heads)))
    arguments = operators.pack(problem)
    out, lse, windows = operators.blocked_op(*arguments)
    given = (torch.ones_like(out), None, out, lse, windows, False, *arguments)
    torch.library.opcheck(operators.blocked_backward_op, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("length", [6, 300])
@pytest.mark.parametrize("scale", [1e-46, 1e-40, 1e-30, 0.0, -0.5])
def test_scales_that_hide_nothing(scale: float, length: int) -> None:
    """The kernel multiplies what hides the future by the scale: 0 * inf."""
    assert_like_reference(tensors(1, 2, length, 8), scale=scale)


@pytest.mark.parametrize("length", [40, 200])
@pytest.mark.parametrize("strides", [(1, "row"), (0, "row"), ("row", 0)])
def test_heads_that_overlap(length: int, strides: tuple[int | str, int | str]) -> None:
    dim = 16
    by_head, by_row = (40 if step == "row" else int(step) for step in strides)
    memory = torch.randn(40 * (length + 2), generator=torch.Generator().manual_seed(0))
    q = memory.as_strided((1, 2, length, dim), (0, by_head, by_row, 1))
    assert_like_reference([q, *tensors(1, 2, length, dim)[1:]])


def test_a_gradient_that_is_not_finite_stays_in_its_block() -> None:
    inputs, grad = tensors(1, 1, 110, 4), torch.ones(1, 1, 110, 4)
    grad[0, 0, 5, 0] = math.nan
    _, _, dk, _ = gradients(inputs, "blocked", grad)
    assert torch.isfinite(dk[0, 0, 64:]).all()


@pytest.mark.parametrize("starts", [[12, 3], [3, 12], [20, -3], [8, 0]])
def test_rows_that_run_past_their_last_key(starts: list[int]) -> None:
    """One row is computed by two calls over all keys, another by none: their gradients were mixed up."""
    q = tensors(2, 2, 8, 4)[0]
    inputs = [q, *tensors(2, 2, 16, 4)[1:]]
    assert_like_reference(inputs, query_start=torch.tensor(starts))


def test_three_rows_that_run_past_their_last_key() -> None:
    assert_like_reference(tensors(3, 1, 16, 4), query_start=torch.tensor([8, 0, -4]))


class Named(ts.LinearBias):
    """A subclass, as users make them to give a bias more of their own."""


def test_a_subclass_of_a_bias_is_that_bias() -> None:
    q, k, v = tensors(1, 4, 300, 16)
    slopes = ts.alibi_slopes(4)
    assert torch.equal(ts.attention(q, k, v, bias=Named(slopes)), ts.alibi_attention(q, k, v, slopes))


def test_a_bias_that_operators_do_not_know_is_refused() -> None:
    class Other(Bias):
        pass

    q, k, v = tensors(1, 4, 30, 16)
    with pytest.raises(
        TypeError, match=r"bias must be a LinearBias, a BucketBias, a DecayBias, a KerpleBias or None, got Other"
    ):
        ts.attention(q, k, v, bias=Other())
