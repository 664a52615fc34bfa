"""The Triton kernels compile for GPUs that are not there: Triton's compiler needs no device, only a target.

The interpreter runs what the compiler may refuse (types that differ between branches, odd sizes of tiles), so every
kernel is compiled as it would be launched, for Hopper and, with a few features, for an older GPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import trainshort as ts
from trainshort.ops import INTERPRETED
from trainshort.ops.bias import Bias, BucketBias, LinearBias
from trainshort.ops.decay import DecayBias
from trainshort.ops.dropout import MULTIPLIERS
from trainshort.ops.problem import DEFAULT_TOLERANCE, Problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(INTERPRETED, reason="the interpreter stands in for the compiler"),
    pytest.mark.filterwarnings("ignore::UserWarning:triton"),
]

NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg")
SHARED = {90: 227 * 1024, 86: 99 * 1024}  # bytes that one program may have, by compute capability


def compile_kernel(kernel: Any, capability: int, values: dict[str, Any]) -> Any:
    """Compile for a target, as a launch with these arguments and options would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    signature, constexprs = {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constexprs[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + NAMES[value.dtype]
        elif isinstance(value, TensorDescriptor):
            shape = ",".join(str(size) for size in value.block_shape)
            signature[parameter.name] = f"tensordesc<{NAMES[value.base.dtype]}[{shape}]>"
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    options = {name: values[name] for name in OPTIONS if name in values}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    shared = compiled.metadata.shared
    assert shared <= SHARED[capability], f"{kernel.fn.__name__} does not fit: {shared} bytes of shared memory"
    return compiled


@pytest.fixture(params=[90, 86], ids=["hopper", "ampere"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernels are compiled instead of launched; what came out, in this list."""
    from triton.runtime.jit import JITFunction

    from trainshort.ops.triton import config, tuning
    from trainshort.ops.triton.cache import CACHE

    found: list[Any] = []

    def compile_instead(kernel: Any, grid: Any) -> Any:
        return lambda **values: found.append(compile_kernel(kernel, request.param, values))

    monkeypatch.setattr(JITFunction, "__getitem__", compile_instead)
    for module in (config, tuning):
        monkeypatch.setattr(module, "is_hopper", lambda device: request.param == 90)
    CACHE.clear()
    tuning.tiles_for.cache_clear()
    yield found
    CACHE.clear()
    tuning.tiles_for.cache_clear()


def linear(heads: int) -> Bias:
    return LinearBias(ts.alibi_slopes(heads))


def sided(heads: int) -> Bias:
    return LinearBias.one_sided(ts.alibi_slopes(heads))


def bucket(heads: int) -> Bias:
    return BucketBias(torch.zeros(32, heads))


def gates(heads: int) -> Bias:
    return DecayBias(torch.zeros(1, heads, 640))


def gates_both_ways(heads: int) -> Bias:
    return DecayBias(torch.zeros(2, heads, 640), future=torch.zeros(2, heads, 640))


def times(heads: int) -> Bias:
    return DecayBias.at(torch.arange(640.0), ts.alibi_slopes(heads))


CASES: dict[str, dict[str, Any]] = {
    "bfloat16_64": {"dim": 64},
    "bfloat16_128": {"dim": 128},
    "bfloat16_256": {"dim": 256},
    "float16_80_odd_heads": {"dim": 80, "heads": 3, "dtype": torch.float16},
    "float32_128": {"dim": 128, "dtype": torch.float32},
    "symmetric": {"dim": 64, "causal": False, "want_bias": True},
    "gradient_of_the_lse": {"dim": 64, "lse_gradient": True},
    "dropout": {"dim": 64, "dropout": 0.1, "seed": torch.zeros((), dtype=torch.int64)},
    "dropout_float32_256": {
        "dim": 256,
        "causal": False,
        "dtype": torch.float32,
        "dropout": 0.25,
        "seed": torch.zeros((), dtype=torch.int64),
    },
    "one_sided": {"dim": 64, "causal": False, "bias": sided},
    "bucket": {"dim": 64, "bias": bucket, "want_bias": True},
    "gates": {"dim": 64, "bias": gates, "want_bias": True},
    "gates_256": {"dim": 256, "bias": gates, "want_bias": True},
    "gates_symmetric": {"dim": 128, "causal": False, "bias": gates_both_ways, "want_bias": True},
    "gates_float32_packed": {
        "dim": 64,
        "batch": 1,
        "dtype": torch.float32,
        "bias": gates,
        "cu_seqlens": torch.tensor([0, 100, 640]),
    },
    "times_symmetric": {"dim": 64, "causal": False, "bias": times, "want_bias": True},
    "no_bias_grouped": {"dim": 128, "bias": lambda heads: None, "kv_heads": 1},
    "packed": {"dim": 64, "batch": 1, "cu_seqlens": torch.tensor([0, 100, 640])},
    "padded": {"dim": 64, "key_padding_mask": torch.ones(2, 640, dtype=torch.bool)},
    "end_of_a_cache": {"dim": 64, "query_start": 100, "keys": 900},
}


@pytest.mark.parametrize("name", CASES)
def test_attention(compiled: list[Any], name: str, request: pytest.FixtureRequest) -> None:
    from trainshort.ops.triton import run

    if "ampere" in request.node.name and name not in ("bfloat16_128", "float32_128"):
        pytest.skip("the same as on Hopper but for the tiles")

    case = {"batch": 2, "heads": 4, "dtype": torch.bfloat16, "bias": linear, "causal": True, "keys": 640} | CASES[
        name
    ]
    batch, heads, dim = case["batch"], case["heads"], case["dim"]
    q = torch.zeros(batch, heads, 640, dim, dtype=case["dtype"])
    k = torch.zeros(batch, case.get("kv_heads", heads), case["keys"], dim, dtype=case["dtype"])
    about = {
        key: case[key] for key in ("cu_seqlens", "key_padding_mask", "query_start", "dropout", "seed") if key in case
    }
    problem = Problem(
        q=q, k=k, v=k, bias=case["bias"](heads), causal=case["causal"], scale=dim**-0.5,
        tolerance=DEFAULT_TOLERANCE[q.dtype], **about,
    )  # fmt: skip
    out, lse, windows = run.forward(problem)
    grad_lse = lse if case.get("lse_gradient", False) else None
    run.backward(problem, q, grad_lse, out, lse, windows, case.get("want_bias", False))
    kernels = {LinearBias: 7, DecayBias: 9}  # three at least; a decay is counted from ends of units, twice
    assert len(compiled) == kernels.get(type(problem.bias), 3)
    hashing = [kernel for kernel in compiled if str(MULTIPLIERS[0]) in kernel.asm["ptx"]]
    assert len(hashing) == (3 if problem.dropout else 0), "without dropout there is nothing of it in the kernels"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decoding(compiled: list[Any], dtype: torch.dtype) -> None:
    from trainshort.ops.triton import run

    q, k = torch.zeros(2, 4, 1, 128, dtype=dtype), torch.zeros(2, 2, 5000, 128, dtype=dtype)
    about = {"causal": True, "scale": 0.1, "tolerance": DEFAULT_TOLERANCE[dtype], "key_norms": torch.ones(2, 2)}
    for bias in (linear(4), DecayBias(torch.zeros(1, 4, 5000))):
        run.decode(Problem(q=q, k=k, v=k, bias=bias, **about))
    assert len(compiled) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [1000, 65536])
def test_running_sums_of_gates(compiled: list[Any], length: int, dtype: torch.dtype) -> None:
    from trainshort.ops.triton import gate_sums

    gates = torch.zeros(2, 3, length, dtype=dtype)
    for ahead in (False, True):
        sums, _ = gate_sums.running_sums(gates, ahead)
    gate_sums.gradient(sums, gates)
    assert len(compiled) == (3 if length <= gate_sums.MOST_AT_ONCE else 6)


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 64), (torch.bfloat16, 256), (torch.float32, 80)], ids=str
)
def test_borders_of_spans(compiled: list[Any], dtype: torch.dtype, dim: int) -> None:
    from trainshort.ops.triton import borders

    q, k = torch.zeros(2, 4, 1000, dim, dtype=dtype), torch.zeros(2, 2, 1000, dim, dtype=dtype)
    center, slopes, x = torch.zeros(2, 2, dim), ts.alibi_slopes(4), torch.ones(2, 4, dtype=torch.float64)
    found = borders.keys(k, center, slopes, x, 8)
    means = torch.cat((found.means[:, :, :8], found.means), dim=2)
    numbers = [each.expand(3, 1, -1, -1, -1).contiguous() for each in (found.at_zero, found.at_most, found.height)]
    longest, bases = torch.ones(3, 2, 2), torch.zeros(3, 1, 4, dtype=torch.float64)
    others = borders.Others(*numbers, longest, bases, 1, 3000, -10.0)
    borders.needed(*borders.queries(q, means, 8, center, slopes, 0.1), others, center, x, slopes)
    assert len(compiled) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_loss(compiled: list[Any], dtype: torch.dtype) -> None:
    from trainshort.models import loss_kernel

    targets = torch.zeros(3, dtype=torch.int64)
    for vocabulary in (61, 50257):
        logits = torch.zeros(3, vocabulary, dtype=dtype)
        for bias in (None, torch.zeros(vocabulary, dtype=dtype)):
            for gradient in (True, False):
                losses, lse = loss_kernel.losses_of(logits, targets, -100, gradient, bias)
            loss_kernel.leave_gradients(logits, targets, -100, lse, losses, bias)
    assert len(compiled) == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_step_of_a_cache(compiled: list[Any], dtype: torch.dtype) -> None:
    """New keys and values at a place that the device knows, attention to them, and rotary embeddings before."""
    from trainshort.ops.bias import NO_BIAS, KernelBias
    from trainshort.ops.triton import run
    from trainshort.ops.triton.call import Rotation, Stored

    q, k = torch.zeros(2, 4, 1, 128, dtype=dtype), torch.zeros(2, 2, 1, 128, dtype=dtype)
    stored = Stored(*(torch.zeros(2, 2, 5000, 128, dtype=dtype) for _ in range(2)), torch.ones(2, 2, 40))
    sequences = torch.zeros(2, 5, dtype=torch.int32)
    run.append(k, k, stored, sequences=sequences)
    kept = DecayBias(torch.zeros(2, 4, 5000))
    for bias in (KernelBias(NO_BIAS), *(each.for_kernels(2) for each in (linear(4), bucket(4), kept))):
        run.step(q, stored, sequences, bias, 0.1)
    run.append_turned(q, k, k, stored, sequences, Rotation(torch.ones(64)))
    assert len(compiled) == 10
    assert ".approx" not in "".join(line for line in compiled[-1].asm["ptx"].splitlines() if "sin" in line)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 256])
def test_a_prompt_into_a_cache(compiled: list[Any], dim: int, dtype: torch.dtype) -> None:
    from trainshort.ops.triton import run
    from trainshort.ops.triton.call import Rotation, Stored

    k = torch.zeros(2, 2, 300, dim, dtype=dtype)
    run.append(k, k, Stored(*(torch.zeros(2, 2, 5000, dim, dtype=dtype) for _ in range(2)), torch.ones(2, 2, 40)))
    run.rotate(k, k, torch.zeros(1, 300, dtype=torch.int64), Rotation(torch.ones(dim // 2)))
    assert len(compiled) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 4])
def test_linear_layers_of_a_step(compiled: list[Any], rows: int, dtype: torch.dtype) -> None:
    from trainshort.ops.triton.few_rows import Norm, linear

    x, weight, bias = torch.zeros(rows, 1024, dtype=dtype), torch.zeros(4096, 1024, dtype=dtype), torch.zeros(4096)
    gain = torch.ones(1024, dtype=dtype)
    linear(x, weight, bias, norm=Norm("layernorm", gain, gain, 1e-5), activation="gelu")
    linear(x, weight, norm=Norm("rmsnorm", gain, None, 1e-5), activation="silu")
    linear(x, weight[:1000], residual=torch.zeros(rows, 1000, dtype=dtype))
    assert len(compiled) == 3
    long, gain = torch.zeros(rows, 4096, dtype=dtype), torch.ones(4096, dtype=dtype)
    linear(long, torch.zeros(64, 4096, dtype=dtype), norm=Norm("layernorm", gain, gain, 1e-5))
    assert len(compiled) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_of_a_bounded_cache(compiled: list[Any], padded: bool, dtype: torch.dtype) -> None:
    from trainshort.ops.ring_step import RingStep
    from trainshort.ops.rings import Rings
    from trainshort.ops.triton import ring_step

    q, k = torch.zeros(2, 4, 128, dtype=dtype), torch.zeros(2, 2, 128, dtype=dtype)
    rings = Rings(k, [256, 1024], [0, 0])
    by_head = {name: torch.zeros(2, dtype=torch.int64) for name in ("capacity", "first", "offset")}
    by_row = {name: torch.zeros(2, 2) for name in ("longest", "before")} | {
        n: torch.zeros(2, 4) for n in ("x", "lse")
    }
    step = RingStep(
        rings=rings, slopes=ts.alibi_slopes(4), scale=0.1, tolerance=2.0**-15, center=torch.zeros(2, 2, 128),
        place=torch.zeros(1, dtype=torch.int64), padding=torch.zeros(2, dtype=torch.int64) if padded else None,
        **by_head, **by_row,
    )  # fmt: skip
    ring_step.attend(q, k, k, step)
    assert len(compiled) == 3
