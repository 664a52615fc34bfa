"""Attention inside torch on a CPU, beyond the contract: what the reference can do, and the blocked backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.ops.cases import random_case
from tests.ops.contract.places import PLACES
from tests.ops.contract.test_torch_features import TRANSFORMS, lowered, of_queries
from tests.ops.dense import differentiate

STEEP = torch.tensor([0.9, 0.3, 0.05])


def attend_with_slopes(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    return ts.alibi_attention(q, k, v, slopes, backend="blocked")


def attend_with_the_papers_slopes(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    return ts.alibi_attention(q, k, v, backend="blocked")


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "all_dimensions"])
@pytest.mark.parametrize("function", [attend_with_slopes, attend_with_the_papers_slopes])
def test_compiled_once_for_all_lengths(function, dynamic: bool | None) -> None:
    """`automatic` compiles a second time for the second length; from then on one graph serves all of them."""
    torch.compiler.reset()
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=count)
    for length in (100, 257, 300, 640):
        case = random_case(queries=length, slopes=STEEP)
        assert torch.equal(compiled(case.q, case.k, case.v, STEEP), function(case.q, case.k, case.v, STEEP))
    assert len(graphs) == (2 if dynamic is None else 1)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "all_dimensions"])
def test_compiled_for_all_lengths_backwards(dynamic: bool | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(attend_with_slopes, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (200, 333, 450):
        case = random_case(queries=length, slopes=STEEP)
        eager = case.run("blocked")
        found = differentiate(case, lambda given: compiled(given.q, given.k, given.v, given.slopes))
        for name, tensor in found.items():
            assert torch.equal(tensor, eager[name]), name


@pytest.mark.parametrize("queries", [5, 900], ids=["few", "many"])
def test_windows_under_autocast(queries: int) -> None:
    """The certificate is not computed in 16 bits: its slack is that of float32."""
    case = random_case(queries=queries, keys=900, heads=8, slopes=torch.linspace(0.1, 0.2, 8), tolerance=0.05)
    expected = lowered(case, torch.bfloat16).windows(1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(case.windows(1), expected)


def test_double_backward_works_where_it_says_so() -> None:
    case = random_case(queries=20)
    q = case.q.clone().requires_grad_()
    out = replace(case, q=q).attend("reference")
    (gradient,) = torch.autograd.grad(out, q, case.upstream(), create_graph=True)
    gradient.sum().backward()
    assert q.grad is not None
    assert bool(torch.isfinite(q.grad).all())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_work_where_the_error_sends_people(name: str) -> None:
    case = random_case(batch=1, heads=2, queries=6, dim=4)
    assert TRANSFORMS[name](of_queries(case, PLACES["reference"]), case.q) is not None


def test_transforms_of_attention_without_a_bias_are_torch_s_own() -> None:
    case = random_case(queries=20, bias="none")
    found = torch.func.grad(lambda q: ts.attention(q, case.k, case.v).square().sum())(case.q)
    q = case.q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(ts.attention(q, case.k, case.v).square().sum(), q)
    torch.testing.assert_close(found, expected)


def test_functionalize_is_no_transform_of_numbers() -> None:
    case = random_case(queries=20)
    attend = of_queries(case, PLACES["blocked"])
    assert torch.equal(torch.func.functionalize(attend)(case.q), attend(case.q))


def test_many_gradients_at_once() -> None:
    case = random_case(queries=20)
    q = case.q.clone().requires_grad_()
    out = of_queries(case, PLACES["blocked"])(q)
    upstream = torch.stack([case.upstream(), -case.upstream(), out.detach()])
    (found,) = torch.autograd.grad(out, q, upstream, is_grads_batched=True, retain_graph=True)
    for one, gradient in zip(found, upstream, strict=True):
        torch.testing.assert_close(one, *torch.autograd.grad(out, q, gradient, retain_graph=True))
