"""Find tiles, warps, stages and registers for the Triton kernels on this GPU: what trainshort's tuning table holds.

    python benchmarks/tune_gpu.py [--dims 64 128] [--lengths 1024 8192] [--dtype bfloat16] [--workers 12]

Every candidate is compiled in a pool of processes first (Triton keeps what is compiled on disk), then each kernel is
timed on its own by the profiler, windows given. Prints the fastest, in the form of the table's rows; what it prints
is put into trainshort/ops/triton/tuning.py by hand.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import trainshort as ts
from trainshort.ops.bias import LinearBias
from trainshort.ops.problem import DEFAULT_TOLERANCE, Problem
from trainshort.ops.triton import config, run
from trainshort.ops.triton.cache import CACHE
from trainshort.ops.triton.tuning import Tiles, tiles_for

HEADS, TOKENS = 16, 16384
KERNELS = {"forward": "forward_kernel", "queries": "query_kernel", "keys": "key_kernel"}
Job = tuple[str, Tiles, int, str]


def candidates(kernel: str) -> list[Tiles]:
    """Tiles of keys have at most 64 for dk and dv: a unit of the windows."""
    rows, keys = ((32, 64), (32, 64)) if kernel == "keys" else ((64, 128), (32, 64, 128))
    found = []
    for row, key, warps, stages, registers in itertools.product(rows, keys, (4, 8), (1, 2, 3), (None, 128, 168)):
        if warps == 8 and row * key < 128 * 64:
            continue
        found.append(Tiles(row, key, warps, stages, registers))
    return found


def problem_of(length: int, dim: int, dtype: str) -> tuple[Problem, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (max(1, TOKENS // length), HEADS, length, dim)
    q, k, v, grad = (
        torch.randn(shape, device="cuda", generator=generator).to(getattr(torch, dtype)) for _ in range(4)
    )
    bias = LinearBias(ts.alibi_slopes(HEADS, "cuda"))
    tolerance = DEFAULT_TOLERANCE[q.dtype]
    return Problem(q=q, k=k, v=v, bias=bias, causal=True, scale=dim**-0.5, tolerance=tolerance), grad


def use(kernel: str, tiles: Tiles) -> None:
    """Make every configuration from here on take these tiles for one kernel."""
    CACHE.clear()
    config.tiles_for = lambda name, *about: tiles if name == kernel else tiles_for(name, *about)


def run_both(problem: Problem, grad: torch.Tensor) -> None:
    run.backward(problem, grad, *run.forward(problem), want_bias=False)


def compiles(job: Job) -> bool:
    kernel, tiles, dim, dtype = job
    try:
        use(kernel, tiles)
        run_both(*problem_of(1024, dim, dtype))
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, mostly
        print("  no:", kernel, tuple(tiles), str(error).splitlines()[0][:90], flush=True)
        return False
    return True


def timed(job: Job, problem: Problem, grad: torch.Tensor) -> float:
    """Microseconds of one kernel."""
    kernel, tiles, _, _ = job
    use(kernel, tiles)
    run_both(problem, grad)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(6):
            run_both(problem, grad)
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in profiled.key_averages() if e.key == KERNELS[kernel]) / 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--workers", type=int, default=12)
    options = parser.parse_args()
    for dim, kernel in itertools.product(options.dims, options.kernels):
        jobs: list[Job] = [(kernel, tiles, dim, options.dtype) for tiles in candidates(kernel)]
        with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            good = [job for job, fine in zip(jobs, pool.map(compiles, jobs), strict=True) if fine]
        problems = {length: problem_of(length, dim, options.dtype) for length in options.lengths}
        times: dict[Any, list[float]] = {
            job[1]: [timed(job, *problems[length]) for length in options.lengths] for job in good
        }
        best = sorted(times, key=lambda tiles: sum(times[tiles]))
        for tiles in best[:5]:
            print(f'("{kernel}", {dim}): {tiles}  # µs: {[round(value, 1) for value in times[tiles]]}', flush=True)


if __name__ == "__main__":
    main()
