"""One program for all lengths: attention compiled with dynamic shapes, and exported over dimensions that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import trainshort as ts

TABLE = torch.randn((32, 4), generator=torch.Generator().manual_seed(7))
STEEP = torch.tensor([0.9, 0.5, 0.3, 0.1])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(
    queries: int, keys: int | None = None, *, batch: int = 2, kv_heads: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    keys = queries if keys is None else keys
    return (
        normal(batch, 4, queries, 8),
        normal(batch, kv_heads, keys, 8, seed=1),
        normal(batch, kv_heads, keys, 8, seed=2),
    )


def padding(length: int) -> Tensor:
    """One row is whole, of the other only the last half is real."""
    return torch.arange(length)[None] >= torch.tensor([0, length // 2])[:, None]


class Attention(nn.Module):
    """A call of attention as a module, which is what torch.export takes."""

    def __init__(self, bias: str = "none", **options: Any) -> None:
        super().__init__()
        self.kind, self.options = bias, options
        self.register_buffer("slopes", STEEP.clone())
        self.register_buffer("table", TABLE.clone())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, given: Tensor | None = None) -> Tensor:
        options = dict(self.options)
        if given is not None:
            options[options.pop("given")] = given
        if self.kind == "paper":
            return ts.alibi_attention(q, k, v, **options)
        biases: dict[str, Callable[[], Any]] = {
            "none": lambda: None,
            "linear": lambda: ts.LinearBias(self.slopes),
            "one_sided": lambda: ts.LinearBias.one_sided(self.slopes),
            "bucket": lambda: ts.BucketBias(self.table),
        }
        return ts.attention(q, k, v, bias=biases[self.kind](), **options)


SQUARE = {
    "paper": Attention("paper"),
    "linear": Attention("linear"),
    "linear_symmetric": Attention("linear", causal=False),
    "one_sided": Attention("one_sided", causal=False),
    "bucket": Attention("bucket"),
    "no_bias": Attention("none"),
    "no_bias_blocked": Attention("none", backend="blocked"),
    "no_bias_symmetric": Attention("none", causal=False),
}
# Where there are more keys than queries.
WIDE = {
    "linear": Attention("linear"),
    "bucket": Attention("bucket"),
    "no_bias": Attention("none"),
    "first_keys": Attention("linear", query_start=0),
}


def results(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, normal(*out.shape, seed=3))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SQUARE)
def test_compiled_forwards_and_backwards(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(SQUARE[name], fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (100, 257, 400, 1, 2):
        inputs = rows(length)
        assert_same(results(compiled, *inputs), results(SQUARE[name], *inputs))


@pytest.mark.parametrize("name", WIDE)
def test_compiled_for_more_keys_than_queries(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(WIDE[name], fullgraph=True, dynamic=True, backend="aot_eager")
    for queries, keys in ((20, 300), (150, 151), (1, 300), (1, 140), (60, 60)):
        inputs = rows(queries, keys)
        assert_same(results(compiled, *inputs), results(WIDE[name], *inputs))


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["none", "linear", "bucket"])
def test_compiled_for_grouped_queries_under_padding(bias: str) -> None:
    torch.compiler.reset()
    module = Attention(bias, given="key_padding_mask")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (100, 257, 1):
        inputs, mask = rows(length, kv_heads=2), padding(length)
        found, expected = (
            results(lambda q, k, v, call=call, mask=mask: call(q, k, v, mask), *inputs) for call in (compiled, module)
        )
        assert_same(found, expected)


def exported(module: nn.Module, inputs: tuple[Tensor, ...], *shapes: Any, strict: bool = False) -> Any:
    """A program for all sizes of the dimensions that `shapes` names, one for each input."""
    return export(module, inputs, dynamic_shapes=shapes, strict=strict).module()


@pytest.mark.parametrize(("example", "strict"), [(64, False), (300, False), (64, True)])
@pytest.mark.parametrize("name", SQUARE)
def test_exported_over_any_length(name: str, example: int, strict: bool) -> None:
    """The example's length must not matter: neither one below a block of 128 nor one beyond."""
    every = {2: Dim("length")}
    program = exported(SQUARE[name], rows(example), every, every, every, strict=strict)
    for length in (2, 3, 64, 128, 129, 500):
        inputs = rows(length)
        assert_same([program(*inputs)], [SQUARE[name](*inputs)])


@pytest.mark.parametrize("name", WIDE)
def test_exported_over_queries_and_keys_apart(name: str) -> None:
    queries, keys = {2: Dim("queries")}, {2: Dim("keys")}
    program = exported(WIDE[name], rows(40, 300), queries, keys, keys)
    for few, many in ((2, 150), (40, 300), (200, 201), (90, 90), (130, 700)):
        inputs = rows(few, many)
        assert_same([program(*inputs)], [WIDE[name](*inputs)])


@pytest.mark.parametrize("name", SQUARE)
def test_exported_over_batch_and_length(name: str) -> None:
    every = {0: Dim("batch"), 2: Dim("length")}
    program = exported(SQUARE[name], rows(64), every, every, every)
    for batch, length in ((2, 64), (3, 200), (5, 2)):
        inputs = rows(length, batch=batch)
        assert_same([program(*inputs)], [SQUARE[name](*inputs)])


def test_exported_with_padding() -> None:
    module = Attention("paper", given="key_padding_mask")
    every, length = {2: Dim("length")}, {1: Dim("length")}
    program = exported(module, (*rows(64), padding(64)), every, every, every, length)
    for size in (2, 64, 300):
        inputs = (*rows(size), padding(size))
        assert_same([program(*inputs)], [module(*inputs)])


def test_exported_with_packed_documents() -> None:
    module = Attention("paper", given="cu_seqlens")
    every, documents = {2: Dim("length")}, {0: Dim("borders")}
    example = (*rows(64, batch=1), torch.tensor([0, 20, 64]))
    program = exported(module, example, every, every, every, documents)
    for borders in ([0, 5], [0, 128, 300], [0, 1, 1, 140, 200]):
        inputs = (*rows(borders[-1], batch=1), torch.tensor(borders))
        assert_same([program(*inputs)], [module(*inputs)])


@pytest.mark.parametrize("name", ["linear", "bucket", "no_bias"])
def test_exported_one_query_at_a_time(name: str) -> None:
    """Decoding: one query, more keys at each step."""
    keys = {2: Dim("keys")}
    program = exported(WIDE[name], rows(1, 50), None, keys, keys)
    for count in (2, 129, 300):
        inputs = rows(1, count)
        assert_same([program(*inputs)], [WIDE[name](*inputs)])
