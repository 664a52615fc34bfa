"""Gated attention on a GPU, beside ALiBi: what a decay costs in the same kernels, and what its windows leave out.

    python benchmarks/decay_gpu.py [--out results.json] [--commit HASH]

Random normal q, k and v, bfloat16, causal, 16 heads, 16,384 tokens (one row beyond). `slopes` is a LinearBias with
the gradient of its slopes. `gates` is a DecayBias of constant gates, log f = -slope, with the gradient of every gate:
the same bias, so the same windows. `gates, kernels` is the same with the running sum of the gates made before, and
the gradient asked for there: what is left are the kernels. `FoX` has gates as that model has them, logits normal
around 4 with offsets from 0 to 8 over the heads. Times are as in attention_gpu.py; decoding is one token after
65,536, replayed from a CUDA graph, with c kept beside the keys.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from contenders_gpu import HEADS, TOKENS, forward_and_backward, inputs, kernel_times, measure
from measured import sources_hash
from torch import Tensor
from triton.testing import do_bench_cudagraph

import trainshort as ts
from trainshort.ops.bias import Bias
from trainshort.ops.problem import DEFAULT_TOLERANCE, Problem
from trainshort.ops.triton import run

CACHED = 65536


def constant_gates(slopes: Tensor, batch: int, length: int) -> Tensor:
    return -slopes[:, None].expand(batch, HEADS, length).contiguous()


def fox_gates(batch: int, length: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(length)
    logits = 4.0 + torch.randn((batch, HEADS, length), device="cuda", generator=generator)
    return torch.nn.functional.logsigmoid(logits + torch.linspace(0.0, 8.0, HEADS, device="cuda")[:, None])


def kept(q: Tensor, k: Tensor, bias: Bias) -> dict[str, float]:
    """The share of all tiles of 64 × 64 up to the diagonal that the forward and the backward pass visit."""
    windows = ts.certified_windows(q, k, bias=bias, block=64).long()
    units = windows.shape[2]
    total = windows[..., 0].numel() * (units + 1) / 2
    scale, tolerance = q.shape[-1] ** -0.5, DEFAULT_TOLERANCE[q.dtype]
    first = run.forward(Problem(q=q, k=k, v=k, bias=bias, causal=True, scale=scale, tolerance=tolerance))[2]
    backward = torch.arange(1, units + 1, device=q.device) - first[..., :units]
    return {
        "kept": float((windows[..., 1] - windows[..., 0]).sum() / total),
        "kept_backward": float(backward.clamp_min(0).sum() / total),
    }


def contenders(batch: int, length: int) -> dict[str, tuple[Callable[[], Bias], Tensor]]:
    """By name: how a call makes its bias, and what the gradient of that is asked for."""
    slopes = ts.alibi_slopes(HEADS, "cuda").requires_grad_()
    gates = constant_gates(slopes.detach(), batch, length).requires_grad_()
    fox = fox_gates(batch, length).requires_grad_()
    made = ts.DecayBias(gates.detach())
    assert made.gate_sums is not None
    sums = made.gate_sums.clone().requires_grad_()
    return {
        "slopes": (lambda: ts.LinearBias(slopes), slopes),
        "gates": (lambda: ts.DecayBias(gates), gates),
        "gates, kernels": (lambda: ts.DecayBias.from_fields(gate_sums=sums, gate_first=made.gate_first), sums),
        "FoX": (lambda: ts.DecayBias(fox), fox),
    }


def training(lengths: list[int]) -> list[dict[str, Any]]:
    records = []
    for dim in (64, 128):
        for length in lengths:
            tensors = inputs(length, dim)
            record: dict[str, Any] = {"length": length, "dim": dim, "ms": {}, "by_kernel": {}, "kept": {}}
            for name, (bias_of, learned) in contenders(tensors[0].shape[0], length).items():

                def call(q: Tensor, k: Tensor, v: Tensor, bias_of: Callable[[], Bias] = bias_of) -> Tensor:
                    return ts.attention(q, k, v, bias=bias_of())

                record["ms"][name] = measure(call, tensors, learned)
                times = kernel_times(forward_and_backward(call, tensors, learned))
                record["by_kernel"][name] = {kernel[:60]: round(ms, 4) for kernel, ms in times.items()}
                with torch.no_grad():
                    record["kept"][name] = kept(*tensors[:2], bias_of())
            records.append(record)
            print(line(record), flush=True)
    return records


def line(record: dict[str, Any]) -> str:
    ms, kept_of = record["ms"], record["kept"]
    numbers = [f"{times['forward_gpu']:8.3f} {times['both_gpu']:8.3f}" for times in ms.values()]
    shares = [f"{100 * share['kept']:5.1f}/{100 * share['kept_backward']:4.1f}" for share in kept_of.values()]
    ratios = [ms[name]["both_gpu"] / ms["slopes"]["both_gpu"] for name in ("gates", "gates, kernels")]
    columns = [*numbers, " ".join(f"{ratio:5.2f}" for ratio in ratios), *shares]
    return f"{record['dim']:4} {record['length']:6}  " + "  ".join(columns)


def decoding() -> list[dict[str, Any]]:
    records = []
    slopes = ts.alibi_slopes(HEADS, "cuda")
    for batch in (1, 8):
        q = torch.randn(batch, HEADS, 1, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, HEADS, CACHED, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        norms = torch.stack([part.float().norm(dim=-1).amax(-1) for part in k.split(8192, dim=2)]).amax(0)
        constant = ts.DecayBias(constant_gates(slopes, batch, CACHED))
        fox = ts.DecayBias(fox_gates(batch, CACHED))
        biases: dict[str, Bias] = {"slopes": ts.LinearBias(slopes), "gates": constant, "FoX": fox}
        with torch.no_grad():
            times = {
                name: do_bench_cudagraph(
                    lambda bias=bias, q=q, k=k, v=v, norms=norms: ts.attention(q, k, v, bias=bias, key_norms=norms),
                    rep=20,
                    return_mode="median",
                )
                for name, bias in biases.items()
            }
        records.append({"batch": batch, "cached": CACHED, "dim": 128, "ms": times})
        print("decoding", batch, {name: round(value, 4) for name, value in times.items()}, flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 16384, 65536])
    parser.add_argument("--parts", nargs="+", choices=("training", "decoding"), default=("training", "decoding"))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    results: dict[str, Any] = {
        "about": {
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "commit": options.commit,
            "sources": sources_hash("decay_gpu"),
            "shapes": f"bfloat16, causal, {HEADS} heads, {TOKENS:,} tokens (one row beyond)",
        }
    }
    for part in options.parts:
        if part == "training":
            print("dim length; ms on the GPU, forward and both, of slopes, gates, gates' kernels and FoX;")
            print("both of gates and of their kernels over that of slopes; % of tiles visited, forward/backward")
        results[part] = training(options.lengths) if part == "training" else decoding()
        if options.out:  # after every part, so that a run cut short leaves what it has
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
