"""Attention on the GPU inside torch, beyond the contract: CUDA graphs, streams, memory of the host, and "auto"."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.gpu.cases import gpu_case
from tests.ops.cases import left_padding
from tests.ops.dense import Case
from tests.ops.triton.rounding import KernelJudge

CASES: dict[str, dict] = {
    "causal": {},
    "symmetric": {"causal": False},
    "padded": {"key_padding_mask": left_padding(640, 260, length=640)},
    "packed": {"batch": 1, "cu_seqlens": torch.tensor([0, 100, 640])},
    "query_start": {"keys": 700, "query_start": torch.tensor([50, 30])},
    "bucket": {"bias": "bucket"},
}


def make(name: str, **more) -> Case:
    return gpu_case(**{"queries": 640, "heads": 4, "dim": 64, "dtype": torch.bfloat16} | CASES[name] | more)


@pytest.mark.parametrize("name", CASES)
def test_cuda_graph(name: str) -> None:
    """Captured forward and backward, replayed with other numbers in the same memory."""
    case, other = make(name), make(name, seed=5)
    leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
    upstream = case.upstream()

    def step() -> tuple[Tensor, ...]:
        given = Case(
            **{f: getattr(case, f) for f in case.__dataclass_fields__} | dict(zip("qkv", leaves, strict=True))
        )
        out = given.attend("triton")
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for inputs in (case, other):
        with torch.no_grad():
            for leaf, tensor in zip(leaves, (inputs.q, inputs.k, inputs.v), strict=True):
                leaf.copy_(tensor)
        graph.replay()
        replayed = [tensor.clone() for tensor in results]
        for tensor, eager in zip(replayed, step(), strict=True):
            assert torch.equal(tensor, eager)


def test_cuda_graph_of_a_decoding_step() -> None:
    case = make("causal", queries=1, keys=2000)
    starts, norms = torch.tensor([1999, 1500], device="cuda"), case.k.norm(dim=-1).amax(-1).float()

    def step() -> Tensor:
        return ts.alibi_attention(case.q, case.k, case.v, query_start=starts, key_norms=norms, backend="triton")

    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for first in (1999, 700, 3):
            starts.fill_(first)
            graph.replay()
            assert torch.equal(out, step())


def test_saved_on_the_cpu() -> None:
    case = make("causal")
    expected = case.run("triton")
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        results = case.run("triton")
    for name, tensor in results.items():
        assert torch.equal(tensor, expected[name]), name


def test_hooks_that_change_the_layout() -> None:
    """Whatever strides the saved tensors come back with, the gradients are the same, the second time as well."""
    case = make("causal")
    layout = {n: getattr(case, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    case = Case(**{f: getattr(case, f) for f in case.__dataclass_fields__} | layout)
    judge = KernelJudge(case)
    judge.check(case.run("triton"))

    def rest(tensor: Tensor) -> Tensor:
        changed = tensor.shape == case.q.shape and tensor.data_ptr() not in (t.data_ptr() for t in layout.values())
        return tensor.contiguous() if changed else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), rest):
        judge.check(case.run("triton"))


def test_auto_takes_the_kernels() -> None:
    case = make("causal")
    assert ts.backend_for(case.q) == "triton"
    assert ts.backend_for(case.q.double()) == "blocked"
    assert torch.equal(case.attend("auto"), case.attend("triton"))


def test_auto_takes_what_the_kernels_do_not() -> None:
    """Twice, because a call like one before takes another way where kernels computed it."""
    case = make("causal")
    wide = torch.randn(1, 2, 100, 300, device="cuda", dtype=torch.bfloat16)
    for q, k, v in ((case.q.double(), case.k.double(), case.v.double()), (wide, wide, wide)):
        expected = ts.alibi_attention(q, k, v, backend="blocked")
        for _ in range(2):
            assert torch.equal(ts.alibi_attention(q, k, v), expected)


def test_auto_without_a_bias() -> None:
    for features in ({}, {"causal": False}, {"kv_heads": 2}, {"queries": 1, "keys": 500}):
        case = make("causal", **{"bias": "none"} | features)
        KernelJudge(case).check(case.run("auto"))


def test_another_stream() -> None:
    case = make("causal")
    expected = case.attend("triton")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = case.attend("triton")
    stream.synchronize()
    assert torch.equal(out, expected)
