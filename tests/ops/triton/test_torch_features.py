"""The kernels inside torch, beyond the contract: the operator of decoding, what they can't do, what a plan keeps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import trainshort as ts
from tests.ops.contract.operators import operator_arguments
from tests.ops.contract.places import PLACES
from tests.ops.contract.test_torch_features import make
from tests.ops.triton.interpreter import problem_of

PLACE = PLACES["interpreted"]


@pytest.mark.parametrize("name", ["causal", "padded", "bucket", "low", "columns"])
def test_the_decoding_operator_is_well_formed(name: str) -> None:
    case = make(PLACE, name)
    arguments = operator_arguments(replace(case, q=case.q[:, :, -2:]), requires_grad=False)
    torch.library.opcheck(torch.ops.trainshort.triton_decode.default, arguments)


def test_double_backward_through_the_operator_is_refused() -> None:
    arguments = operator_arguments(make(PLACE, "causal"), requires_grad=True)
    out = torch.ops.trainshort.triton(*arguments)[0]
    (gradient,) = torch.autograd.grad(out, arguments[0], torch.ones_like(out), create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward.*reference"):
        gradient.sum().backward()


def test_many_gradients_at_once_are_refused() -> None:
    case = make(PLACE, "causal")
    q = case.q.clone().requires_grad_()
    out = ts.alibi_attention(q, case.k, case.v, backend="triton")
    upstream = torch.stack((case.upstream(), case.upstream()))
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.autograd.grad(out, q, upstream, is_grads_batched=True)


@pytest.mark.parametrize("queries", [1, 70])
def test_negative_norms_are_refused(queries: int) -> None:
    case = make(PLACE, "causal")
    q, norms = case.q[:, :, -queries:], torch.full((*case.k.shape[:2], 1), -1.0)
    with pytest.raises(ValueError, match=r"key_norms must not be negative, got -1\.0"):
        ts.alibi_attention(q, case.k, case.v, key_norms=norms, backend="triton")
    visited = ts.alibi_attention(q, case.k, case.v, key_norms=norms * math.nan, backend="triton")
    torch.testing.assert_close(visited, ts.alibi_attention(q, case.k, case.v, backend="reference"))


def test_too_many_rows_are_refused() -> None:
    many = torch.zeros(1, 1, 8).expand(65536, 1, 1, 8)
    with pytest.raises(ValueError, match=r"at most 65,535 rows and heads, got 65,536 and 1: split the batch"):
        ts.attention(many, many, many, backend="triton", causal=False)


def test_what_it_cannot_do_is_said() -> None:
    wide, double = torch.zeros(1, 1, 4, 257), torch.zeros(1, 1, 4, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"head_dim of at most 256, got 257.*blocked"):
        ts.alibi_attention(wide, wide, wide, backend="triton")
    with pytest.raises(RuntimeError, match=r"float32, got torch.float64.*blocked"):
        ts.alibi_attention(double, double, double, backend="triton")


def test_what_a_configuration_holds_is_all_that_it_is_found_by() -> None:
    """A configuration holds strides of its first call: problems with others must not share it."""
    from trainshort.ops.triton.call import describe
    from trainshort.ops.triton.config import config_for

    case = make(PLACE, "left_right", batch=2)
    by_row = replace(case, future=PLACE.steep_by_row)
    one, other = (config_for(describe(problem_of(c)).features, c.q, c.k, c.v) for c in (case, by_row))
    assert one.values["stride_slope"] != other.values["stride_slope"]
    assert one is not other
