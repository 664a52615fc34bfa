"""Gated and timed attention on the CPU, beside ALiBi: what a decay costs in the same passes.

    python benchmarks/decay_cpu.py [--lengths 2048 16384] [--out results.json]

Random normal inputs, as in attention_cpu.py. `slopes` is a LinearBias, `learned slopes` one with the gradient of
its slopes. `gates` is a DecayBias of constant gates, log f = -slope, with the gradient of every gate: the same
bias, so the same windows. `times` is a DecayBias of whole seconds, one a token: the same bias again. `FoX` has
gates as that model has them, logits normal around 4 with offsets from 0 to 8 over the heads, and their gradients:
other windows. The sums of the gates are part of each call. Contenders alternate in one process; times are medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention_cpu import DIM, HEADS, SHAPES, TOKENS, about, alternate
from torch import Tensor

import trainshort as ts
from trainshort.ops.bias import Bias


def fox_gates(batch: int, length: int) -> Tensor:
    logits = 4.0 + torch.randn((batch, HEADS, length), generator=torch.Generator().manual_seed(length))
    return torch.nn.functional.logsigmoid(logits + torch.linspace(0.0, 8.0, HEADS)[:, None])


def contenders(batch: int, length: int) -> dict[str, tuple[Callable[[Tensor], Bias], Tensor, bool]]:
    """By name: the bias as a function of a tensor, that tensor, and whether its gradient is asked for."""
    slopes, seconds = ts.alibi_slopes(HEADS), torch.arange(length)
    gates = -slopes[:, None].expand(batch, HEADS, length).contiguous()
    return {
        "slopes": (ts.LinearBias, slopes, False),
        "learned slopes": (ts.LinearBias, slopes, True),
        "gates": (ts.DecayBias, gates, True),
        "times": (lambda slopes: ts.DecayBias.at(seconds, slopes), slopes, False),
        "FoX": (ts.DecayBias, fox_gates(batch, length), True),
    }


def share_of_blocks(q: Tensor, k: Tensor, bias: Bias) -> float:
    """Of all blocks of 128 × 128 up to the diagonal, those that are visited."""
    windows = ts.certified_windows(q, k, bias=bias)
    blocks = windows.shape[2]
    return float((windows[..., 1] - windows[..., 0]).sum() / (windows[..., 0].numel() * (blocks + 1) / 2))


def measure(length: int, seconds: float) -> dict[str, Any]:
    torch.manual_seed(length)
    batch = max(1, TOKENS // length)
    q, k, v, grad = (torch.randn(batch, HEADS, length, DIM) for _ in range(4))
    forward, both, kept = {}, {}, {}
    for name, (bias_of, tensor, learned) in contenders(batch, length).items():
        inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        inputs.append(tensor.clone().requires_grad_(learned))

        def call(inputs: list[Tensor] = inputs, bias_of: Any = bias_of) -> Tensor:
            *tokens, tensor = inputs
            return ts.attention(*tokens, bias=bias_of(tensor))

        def with_gradients(inputs: list[Tensor] = inputs, call: Any = call) -> object:
            return torch.autograd.grad(call(), [each for each in inputs if each.requires_grad], grad)

        forward[name], both[name] = call, with_gradients
        kept[name] = share_of_blocks(q, k, bias_of(tensor))
    with torch.no_grad():
        forward_ms = alternate(forward, seconds, 5)
    return {"length": length, "forward_ms": forward_ms, "both_ms": alternate(both, seconds, 5), "kept": kept}


def line(record: dict[str, Any]) -> str:
    forward, both = record["forward_ms"], record["both_ms"]
    slopes = forward["slopes"], both["slopes"]
    ratios = (f"{name} {forward[name] / slopes[0]:.2f}x {both[name] / slopes[1]:.2f}x" for name in forward)
    return f"{record['length']:>7}  slopes {slopes[0]:.1f}, {slopes[1]:.1f} ms  " + ", ".join(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each measurement")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = []
    for length in options.lengths:
        records.append(measure(length, options.seconds))
        print(line(records[-1]), flush=True)
    if options.out:
        header = about(options.threads, "decay_cpu") | {"shapes": SHAPES}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"about": header, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
