"""ALiBi attention on the CPU, beside the best that torch offers there.

    python benchmarks/attention_cpu.py [--lengths 128 512 ...] [--out results.json]

The baseline is `F.scaled_dot_product_attention` with a float32 row bias [1, H, 1, N] and `is_causal`: linear in
memory, but it adds absolute positions, which costs digits. Both run in the same process, alternating, on random
normal inputs; the cost of finding windows is part of ours. Times are medians. Everything is measured on an idle
machine, and the common lengths once more beside a process that keeps one core busy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from measured import ROOT, sources_hash

import trainshort as ts

HEADS, DIM, TOKENS = 8, 64, 4096
SHAPES = f"float32, {HEADS} heads, head_dim {DIM}, {TOKENS} tokens (one row beyond)"


def row_bias(slopes: torch.Tensor, length: int) -> torch.Tensor:
    return (slopes[:, None] * torch.arange(length)).view(1, len(slopes), 1, length)


def alternate(calls: dict[str, Callable[[], object]], seconds: float, least: int) -> dict[str, float]:
    """Median milliseconds of each call, measured in turns so that they share the machine's moods."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    begin = time.perf_counter()
    while len(times[next(iter(calls))]) < least or time.perf_counter() - begin < seconds:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Another process, which wants a core all the time."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def exact_rows(q, k, v, slopes, rows: torch.Tensor) -> torch.Tensor:
    """Dense float64 attention of some queries of the first row of the batch."""
    q, k, v = (t[0].double() for t in (q, k, v))
    distance = rows[:, None] - torch.arange(k.shape[1])
    scores = q[:, rows] @ k.transpose(-2, -1) / DIM**0.5 - slopes.double()[:, None, None] * distance
    return torch.softmax(scores.masked_fill(distance < 0, float("-inf")), dim=-1) @ v


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def peak_above(call: Callable[[], object]) -> float:
    """Megabytes that a call holds at its peak beyond what was there before, its result included."""
    call()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back, or the call would find its memory there
    before, peak, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    done.set()
    watcher.join()
    return (peak[0] - before) / 1e6


def measure(length: int, seconds: float, backward: bool, kind: str = "normal") -> dict:
    torch.manual_seed(length)
    batch = max(1, TOKENS // length)
    least = 5 if length <= 4096 else 2
    q, k, v, grad = (torch.randn(batch, HEADS, length, DIM) for _ in range(4))
    slopes = ts.alibi_slopes(HEADS)
    tolerance = None
    if kind == "tolerance 0":
        tolerance = 0.0
    if kind == "outlier":
        k[:, :, 0] *= 1e4
    bias = row_bias(slopes, length)

    def ours(q, k, v):
        return ts.alibi_attention(q, k, v, slopes, tolerance=tolerance)

    def baseline(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=True)

    def both(function):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return lambda: torch.autograd.grad(function(*leaves), leaves, grad)

    windows = ts.certified_windows(q, k, slopes, tolerance=tolerance)
    causal = batch * HEADS * sum(range(1, -(-length // 128) + 1))
    record = {"length": length, "batch": batch, "kind": kind}
    record["kept"] = round(int((windows[..., 1] - windows[..., 0]).sum()) / causal, 4)
    with torch.no_grad():
        times = alternate({"ours": lambda: ours(q, k, v), "baseline": lambda: baseline(q, k, v)}, seconds, least)
        record["forward_ms"] = {name: round(value, 2) for name, value in times.items()}
        record["forward_speedup"] = round(times["baseline"] / times["ours"], 2)
        rows = torch.linspace(0, length - 1, min(length, 256)).long()
        exact = exact_rows(q, k, v, slopes, rows)
        record["error"] = {
            "ours": relative_error(ours(q[:1], k[:1], v[:1])[0][:, rows], exact),
            "baseline": relative_error(baseline(q[:1], k[:1], v[:1])[0][:, rows], exact),
        }
        if length >= 16384 and kind == "normal":
            record["peak_mb_beyond_inputs"] = round(peak_above(lambda: ours(q, k, v)), 1)
            record["output_mb"] = round(q.numel() * 4 / 1e6, 1)
    if backward:
        times = alternate({"ours": both(ours), "baseline": both(baseline)}, seconds, least)
        record["both_ms"] = {name: round(value, 2) for name, value in times.items()}
        record["both_speedup"] = round(times["baseline"] / times["ours"], 2)
    return record


def line(record: dict) -> str:
    error = record["error"]
    both = f"{record['both_speedup']:6.2f}x" if "both_speedup" in record else "      -"
    peak = record.get("peak_mb_beyond_inputs")
    return (
        f"{record['length']:>7} {record['kind']:<12} kept {record['kept']:6.1%}  forward "
        f"{record['forward_ms']['ours']:9.1f} / {record['forward_ms']['baseline']:9.1f} ms "
        f"{record['forward_speedup']:6.2f}x  both {both}  error {error['ours']:.1e} / {error['baseline']:.1e}"
        + (f"  peak {peak:.0f} MB (output {record['output_mb']:.0f})" if peak is not None else "")
    )


def commit() -> str:
    """The last one, and whether anything but results has changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")
    except OSError:  # no git here
        return "unknown"


def about(threads: int, result: str) -> dict[str, str]:
    """Where, with what and of which sources something was measured; result: its name in measured.py."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "machine": f"{names[0] if names else platform.machine()}, {threads} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "sources": sources_hash(result),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048, 16384, 65536])
    parser.add_argument("--hard-lengths", type=int, nargs="*", default=[128, 512, 2048, 16384])
    parser.add_argument("--beside-lengths", type=int, nargs="*", default=[128, 512, 1024, 2048, 16384])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each measurement")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = []
    for length in options.lengths:
        records.append(measure(length, options.seconds, backward=length <= 16384))
        print(line(records[-1]), flush=True)
    for length in options.hard_lengths:
        for kind in ("tolerance 0", "outlier"):
            records.append(measure(length, options.seconds, backward=True, kind=kind))
            print(line(records[-1]), flush=True)
    beside = []
    if options.beside_lengths:
        print("beside a process that keeps a core busy")
        with busy_neighbour():
            for length in options.beside_lengths:
                beside.append(measure(length, options.seconds, backward=True))
                print(line(beside[-1]), flush=True)
    if options.out:
        header = about(options.threads, "attention_cpu") | {"shapes": SHAPES}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"about": header, "records": records, "beside": beside}, indent=1) + "\n")


if __name__ == "__main__":
    main()
