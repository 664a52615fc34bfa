"""Gates and times on a GPU at real sizes: errors against float64, the gradient of 65,536 gates, graphs, compilers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.gpu.cases import gpu_case
from tests.ops.cases import random_gates
from tests.ops.contract.test_windows import extreme_gates
from tests.ops.dense import Case
from tests.ops.test_decay import FLA, FOX, gates_gradient
from tests.ops.triton.rounding import KernelJudge

LENGTH = 4096
CASES: dict[str, dict] = {
    "bf16_64": {"dim": 64},
    "bf16_128": {"dim": 128},
    "fp16_64_both_sides": {"dim": 64, "causal": False, "dtype": torch.float16},
    "bf16_64_grouped": {"dim": 64, "heads": 4, "kv_heads": 2},
    "bf16_128_packed": {"dim": 128, "cu_seqlens": torch.tensor([0, 5, 1000, 1000, 3333, LENGTH])},
    "bf16_64_extreme": {"dim": 64, "heads": 4, "log_gates": extreme_gates(LENGTH)},
    "fp32_64": {"dim": 64, "heads": 1, "dtype": torch.float32},
    "fp32_64_times_both_sides": {"dim": 64, "bias": "times", "causal": False, "dtype": torch.float32},
    "bf16_128_times": {"dim": 128, "bias": "times"},
}


@pytest.mark.parametrize("name", CASES)
def test_errors_at_4096(name: str) -> None:
    about = {"batch": 1, "heads": 2, "queries": LENGTH, "dtype": torch.bfloat16, "bias": "gates"} | CASES[name]
    case = gpu_case(**about)
    results = case.run("triton")
    KernelJudge(case).check(results)
    again = case.run("triton")
    for key, tensor in results.items():
        assert torch.equal(tensor, again[key]), f"{key} differs from run to run"


@pytest.mark.parametrize("length", [2049, 65536, 300_001])
def test_sums_of_gates_never_rise(length: int) -> None:
    """Across chunks too, which two kernels add up, and they are those of torch's own scan."""
    gates = -torch.rand(3, 4, length, device="cuda").exp().log1p()
    gates[0, 0, ::977], gates[1, 2, 5::3001], gates[2] = -1e5, -torch.inf, gates[2] * 1e-6
    bias = ts.DecayBias(gates)
    assert bias.gate_sums is not None
    assert bool((bias.gate_sums.diff() <= 0).all())
    counted = gates.double().masked_fill(gates.isinf(), 0.0)
    counted[..., 0] = 0.0
    torch.testing.assert_close(bias.gate_sums, counted.cumsum(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.alone
@pytest.mark.parametrize("dim", [64, 128])
def test_gradient_of_65536_gates(dim: int) -> None:
    """Within half a percent, in heads that forget within tokens and in others that remember thousands of them."""
    generator = torch.Generator("cuda").manual_seed(dim)
    heads, length = 4, 65536

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    q, k, v, upstream = (normal(1, heads, length, dim).bfloat16() for _ in range(4))
    offsets = torch.tensor([0.0, 3.0, 5.0, 7.0], device="cuda")[:, None]
    gates = torch.nn.functional.logsigmoid(normal(1, heads, length) + offsets).requires_grad_()
    out = ts.attention(q, k, v, bias=ts.DecayBias(gates), backend="triton")
    (found,) = torch.autograd.grad(out, gates, upstream)
    for head in range(heads):
        one = (tensor[0, head].detach().double() for tensor in (q, k, v, upstream, gates))
        exact = gates_gradient(*one)
        error = (found[0, head].double() - exact).norm() / exact.norm()
        assert float(error) <= 0.005, f"head {head}: {float(error):.2%}"


@pytest.mark.parametrize("low", [0.0, 5.0])
@pytest.mark.parametrize("shape", FOX)
def test_grid_of_fox(shape: tuple[int, int, int, int, int], low: float) -> None:
    """With its rule: no number is off by more than a hundredth."""
    rows, heads, queries, keys, dim = shape
    generator = torch.Generator().manual_seed(24)
    logits = low + 5.0 * torch.rand((rows, heads, keys), generator=generator)
    case = gpu_case(
        batch=rows, heads=heads, queries=queries, keys=keys, dim=dim, dtype=torch.float16, bias="gates", scale=0.5,
        log_gates=torch.nn.functional.logsigmoid(logits),
    )  # fmt: skip
    half = {name: getattr(case, name) * 0.5 for name in ("q", "k", "v")}
    case = Case(**half, log_gates=case.log_gates, scale=0.5)
    results, judge = case.run("triton"), KernelJudge(case)
    judge.check(results)
    for name, tensor in results.items():
        assert float((tensor.double() - judge.truth[name]).abs().max()) <= 1e-2 * max(
            1.0, float(judge.truth[name].abs().max())
        ), name


@pytest.mark.parametrize("shape", [*FLA, (4, 2048, 2, 8, 64, 0.1)])
def test_grid_of_flash_linear_attention(shape: tuple[int, int, int, int, int, float]) -> None:
    """With its rule: root mean squares of errors within half a percent of those of the results."""
    rows, length, kv_heads, heads, dim, scale = shape
    generator = torch.Generator().manual_seed(42)
    case = gpu_case(
        batch=rows, heads=heads, kv_heads=kv_heads, queries=length, dim=dim, scale=scale, dtype=torch.float16,
        bias="gates", log_gates=-0.01 - 0.09 * torch.rand((rows, heads, length), generator=generator),
    )  # fmt: skip
    results, judge = case.run("triton"), KernelJudge(case)
    judge.check(results)
    for name, tensor in results.items():
        assert float((tensor.double() - judge.truth[name]).norm() / judge.truth[name].norm()) < 0.005, name


def test_constant_gates_are_alibi_and_visit_no_more() -> None:
    heads, length = 8, 8192
    q, k = (torch.randn(1, heads, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slopes = ts.alibi_slopes(heads, "cuda")
    gates = ts.DecayBias(-slopes[:, None].expand(1, heads, length))
    outs, windows = [], []
    for bias in (ts.LinearBias(slopes), gates):
        outs.append(ts.attention(q, k, k, bias=bias, backend="triton").float())
        windows.append(ts.certified_windows(q, k, bias=bias, block=64).long())
    assert float((outs[0] - outs[1]).norm() / outs[0].norm()) < 2e-3
    visited = [int((each[..., 1] - each[..., 0]).sum()) for each in windows]
    assert visited[1] <= 1.02 * visited[0]


def step_of(kind: str) -> tuple[list[Tensor], object]:
    """Leaves, and a step from them to gradients in .grad."""
    leaves = [torch.randn(2, 4, 640, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    leaves.append(random_gates(2, 4, 640).cuda() if kind == "gates" else ts.alibi_slopes(4, "cuda"))
    times = torch.rand(640, device="cuda", dtype=torch.float64).cumsum(0)
    for leaf in leaves:
        leaf.requires_grad_()

    def step(q: Tensor, k: Tensor, v: Tensor, learned: Tensor) -> Tensor:
        bias = ts.DecayBias(learned) if kind == "gates" else ts.DecayBias.at(times, learned)
        return ts.attention(q, k, v, bias=bias).float().square().sum()

    return leaves, step


@pytest.mark.parametrize("kind", ["gates", "times"])
def test_compiled(kind: str) -> None:
    leaves, step = step_of(kind)
    expected = torch.autograd.grad(step(*leaves), leaves)  # type: ignore[operator]
    compiled = torch.compile(step, fullgraph=True)  # type: ignore[call-overload]
    for found, wanted in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", ["gates", "times"])
def test_in_a_cuda_graph(kind: str) -> None:
    """Captured once, replayed on other numbers: nothing waits for the GPU or asks it anything."""
    leaves, step = step_of(kind)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(step(*leaves), leaves)  # type: ignore[operator]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(step(*leaves), leaves)  # type: ignore[operator]
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(0.5)
    graph.replay()
    for found, wanted in zip(captured, torch.autograd.grad(step(*leaves), leaves), strict=True):  # type: ignore[operator]
        assert torch.equal(found, wanted)
