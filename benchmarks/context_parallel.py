"""What context parallelism sends, beside ring attention; how even its work is; what it costs to compute.

    python benchmarks/context_parallel.py [--lengths 16384 65536] [--out results.json]
    python benchmarks/context_parallel.py --gpu            # time of the ranks' compute, one after another; a result
                                                           # of its own, context_parallel_gpu.json

Bytes are counted by planning real calls (random normal q, k and v) for ranks that are simulated in one process: what
ranks fetch, and send back gradients of, is decided before anything is computed. Beside them stands what a formula
says from slopes and norms alone, which then tells what would be sent at sizes that run nowhere here.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from attention_cpu import commit
from measured import sources_hash
from torch import Tensor

import trainshort as ts
from trainshort.ops.context import bounds
from trainshort.ops.context.call import FIELDS
from trainshort.ops.context.exchange import message_size
from trainshort.ops.context.parallel import call_maker, simulate
from trainshort.ops.context.plan import Plan, make_plan
from trainshort.ops.context.transport import Simulated
from trainshort.ops.near import lse_lower_bound
from trainshort.ops.problem import BLOCK, make_problem

HEADS, DIM, RANKS = 16, 64, 4
SAMPLE = 8192  # rows, for the norms of the formula
OURS = ("sample", "bounds", "largest", "forward", "order", "query", "key")
ATTENTION = [f"{name}_kernel" for name in OURS]  # what one process runs too
PAPER = (64, 10_000_000)  # ranks and tokens, by formula alone


def inputs(length: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn((1, HEADS, length, DIM), dtype=dtype, device=device) for _ in range(3)]


def plan(length: int, ranks: int, dtype: torch.dtype) -> tuple[list[Plan], int]:
    """The plans of all ranks for one call, and the bytes they sent for them."""
    spans = zip(*(tensor.split(length // ranks, dim=2) for tensor in inputs(length, dtype)), strict=True)
    group = Simulated(ranks)
    bias = ts.LinearBias(ts.alibi_slopes(HEADS))
    calls = [call_maker(*span, bias, "auto", {}) for span in spans]
    plans = group.run([make_plan(rank, call, torch.device("cpu")) for rank, call in enumerate(calls)])
    return plans, sum(sent.bounds for sent in group.sent)


def reaches(dtype: torch.dtype) -> list[int]:
    """How far back each head needs keys, in whole blocks, by the formula of docs/context-parallel.md:

        W = max over rows p of (x_p K + ln(2/tolerance) - ln(1 - e^-m) - L_p) / m - p

    for a row p steps behind the start of its span, with K = (f(X) - f(0)) / X of a block. Norms, K and L are those of
    a sample of random rows.
    """
    problem = make_problem(*inputs(SAMPLE, dtype), ts.LinearBias(ts.alibi_slopes(HEADS)))
    slopes = ts.alibi_slopes(HEADS).double()
    x = bounds.query_norms(problem)[0]  # [H, T]
    norms = problem.k[0].double().norm(dim=-1)
    largest = x.amax(-1)
    fade = slopes[:, None] * torch.arange(1 - BLOCK, 1)
    blocks = norms.unflatten(1, (-1, BLOCK))
    most = torch.logsumexp(largest[:, None, None] * blocks + fade[:, None], dim=-1)
    chord = ((most - torch.logsumexp(fade, dim=-1)[:, None]) / largest[:, None]).mean(-1)  # [H]
    near = lse_lower_bound(problem, None, x[None], norms.amax(-1)[None])[0][:, 256:]  # with all near keys in sight
    cost = x[:, 256:] * chord[:, None] + math.log(2 / problem.tolerance) - near
    place = torch.arange(cost.shape[1])
    needed = ((cost - torch.log(-torch.expm1(-slopes))[:, None]) / slopes[:, None] - place).amax(-1)
    return [-(-math.ceil(keys) // BLOCK) * BLOCK for keys in needed.tolist()]


def by_formula(length: int, ranks: int, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of keys, values and their gradients, of bounds, and of a ring."""
    span, size = length // ranks, dtype.itemsize
    keys = sum(min(reach, rank * span) for reach in reaches(dtype) for rank in range(1, ranks))
    blocks = -(-span // BLOCK)
    own = 8 * (2 + len(FIELDS))  # what every rank tells every other: sizes,
    own += 8 * (HEADS * (DIM + 2) + HEADS)  # a sample of keys, the longest query,
    own += HEADS * (16 * blocks + bounds.TILES * (8 + 4 * DIM) + 4)  # bounds of blocks and means of tiles,
    own += 16 * HEADS  # and windows
    return {
        "keys": 4 * DIM * size * keys,
        "bounds": own * ranks * (ranks - 1),
        "ring": 4 * DIM * size * HEADS * length * (ranks - 1),
    }


def measure(length: int, dtype: torch.dtype) -> dict[str, Any]:
    plans, told = plan(length, RANKS, dtype)
    like = plans[0].problem.k
    keys = 2 * sum(message_size(places.size, 0, like) for each in plans for places in each.traffic.wanted)
    formula = by_formula(length, RANKS, dtype)
    return {
        "length": length, "ranks": RANKS, "dtype": str(dtype).removeprefix("torch."), "keys": keys, "bounds": told,
        "ring": formula["ring"], "share": (keys + told) / formula["ring"], "formula": formula,
        "formula_share": (formula["keys"] + formula["bounds"]) / formula["ring"],
    }  # fmt: skip


def balance(length: int) -> list[float]:
    """The share of all visited key blocks that falls to each rank; under dense causal attention (2r + 1) / ranks²."""
    q, k, _ = inputs(length, torch.float32)
    windows = ts.certified_windows(q, k)
    blocks = (windows[..., 1] - windows[..., 0]).sum((0, 1)).double()
    shares = blocks.unflatten(0, (RANKS, -1)).sum(-1)
    return (shares / shares.sum()).tolist()


def on_gpu(length: int) -> dict[str, Any]:
    """Milliseconds of one process and of all ranks, one after another in one process: forward and backward. Memory
    that is copied to cut inputs into spans and to put outputs together is nobody's in a real run, and not counted."""
    bias = ts.LinearBias(ts.alibi_slopes(HEADS, "cuda"))
    whole = [tensor.requires_grad_() for tensor in inputs(length, torch.bfloat16, "cuda")]
    grad = torch.randn_like(whole[0])
    parts = [
        [part.contiguous() for part in tensor.detach().split(length // RANKS, dim=2)] for tensor in (*whole, grad)
    ]
    spans = [tuple(tensor.requires_grad_() for tensor in span) for span in zip(*parts[:3], strict=True)]

    def one() -> None:
        torch.autograd.grad(ts.attention(*whole, bias=bias), whole, grad)

    def ranks() -> None:
        outs, _ = simulate(spans, bias=bias)
        torch.autograd.grad(outs, [tensor for span in spans for tensor in span], parts[3])

    alone, shared = _profiled(one), _profiled(ranks)
    ratios = {name: shared[name] / alone[name] for name in ("kernels", "attention", "clock")}
    return {"length": length, "ranks_by_one": ratios, "one": alone, "ranks": shared}


def _profiled(call: Any, repeats: int = 10) -> dict[str, Any]:
    """Milliseconds of the GPU in all kernels and copies, in those of attention alone, and of the clock; how many
    there are; and the ten that take longest."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    kernels = [(event.key, event.self_device_time_total / 1000 / repeats) for event in events]
    return {
        "kernels": sum(time for _, time in kernels),
        "attention": sum(time for name, time in kernels if name in ATTENTION),
        "clock": begin.elapsed_time(end) / repeats,
        "launches": sum(event.count for event in events) / repeats,
        "by_name": {_short(name): time for name, time in sorted(kernels, key=lambda each: -each[1])[:10]},
    }


def _short(name: str) -> str:
    """The name of a kernel without most of the templates of torch's."""
    return name.replace("at::native::", "").replace("void ", "")[:80]


def about(measured: str | None, gpu: bool) -> dict[str, str]:
    return {
        "machine": torch.cuda.get_device_name() if gpu else platform.machine(),
        "torch": torch.__version__,
        "commit": measured or commit(),
        "sources": sources_hash("context_parallel_gpu") if gpu else sources_hash("context_parallel"),
        "shapes": f"random normal, causal, {HEADS} heads, head_dim {DIM}, forward + backward",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 65_536])
    parser.add_argument("--gpu", action="store_true", help="time the ranks' compute instead")
    parser.add_argument("--commit", help="what is measured (default: ask git)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.gpu and not torch.cuda.is_available():
        sys.exit("--gpu needs a CUDA device")
    found: dict[str, Any] = {"about": about(options.commit, options.gpu)}
    if options.gpu:
        found["records"] = [on_gpu(length) for length in options.lengths]
    else:
        dtypes = (torch.bfloat16, torch.float32)
        found["records"] = [measure(length, dtype) for length in options.lengths for dtype in dtypes]
        ranks, length = PAPER
        paper = by_formula(length, ranks, torch.bfloat16)
        found["paper"] = {"ranks": ranks, "length": length, **paper}
        found["balance"] = balance(options.lengths[0])
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
