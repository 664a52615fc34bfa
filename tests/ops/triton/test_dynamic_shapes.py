"""One program for all lengths: the kernels compiled with dynamic shapes, and exported over dimensions that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import trainshort as ts
from tests.ops.contract.places import PLACES
from trainshort.ops.triton import shapes


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.register_buffer("slopes", PLACES["interpreted"].steep)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return ts.alibi_attention(q, k, v, self.slopes, cu_seqlens=cu_seqlens, backend="triton", **self.options)


@pytest.fixture(autouse=True)
def _windows_from_100_keys_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that lengths on both sides of where keys begin to be skipped are short."""
    monkeypatch.setattr(shapes, "SHORTEST", 100)
    torch.compiler.reset()


def rows(length: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    case = PLACES["interpreted"].case(queries=length, keys=keys or length)
    return case.q, case.k, case.v


def results(function: Any, *inputs: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_compiled_once_for_lengths_that_skip_keys_and_lengths_that_do_not(causal: bool) -> None:
    graphs = []

    def count(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = Attention(causal=causal)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=count)
    for length in (40, 130, 20):
        inputs = rows(length)
        assert torch.equal(compiled(*inputs), module(*inputs))
    assert len(graphs) == 1


@pytest.mark.slow
def test_compiled_forwards_and_backwards() -> None:
    module = Attention()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (40, 130, 1):
        inputs = rows(length)
        for one, two in zip(results(compiled, *inputs), results(module, *inputs), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("example", [30, 130])
def test_exported_over_any_length(example: int) -> None:
    """Short texts, too: where eager decoding has kernels of its own, a program for all lengths can't choose them."""
    module, every = Attention(), {2: Dim("length")}
    program = export(module, rows(example), dynamic_shapes=(every, every, every)).module()
    for length in (2, 20, 130):
        inputs = rows(length)
        torch.testing.assert_close(program(*inputs), module(*inputs), rtol=1e-5, atol=1e-5)


def test_exported_over_queries_and_keys_apart() -> None:
    module, queries, keys = Attention(), {2: Dim("queries")}, {2: Dim("keys")}
    program = export(module, rows(20, 140), dynamic_shapes=(queries, keys, keys)).module()
    for few, many in ((2, 50), (70, 130), (30, 30)):
        inputs = rows(few, many)
        torch.testing.assert_close(program(*inputs), module(*inputs), rtol=1e-5, atol=1e-5)


def test_exported_over_any_number_of_documents() -> None:
    module, every, documents = Attention(), {2: Dim("length")}, {0: Dim("borders")}
    example = (*rows(70), torch.tensor([0, 20, 70]))
    program = export(module, example, dynamic_shapes=(every, every, every, documents)).module()
    for borders in ([0, 40], [0, 30, 30, 110, 130]):
        inputs = (*rows(borders[-1]), torch.tensor(borders))
        torch.testing.assert_close(program(*inputs), module(*inputs), rtol=1e-5, atol=1e-5)
