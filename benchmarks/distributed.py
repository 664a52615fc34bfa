"""Tokens a second of `trainshort train` by several processes, or by one that shares like several, beside a plain one.

    python benchmarks/distributed.py cpu [--out results.json] [--repeats 3]     two processes, a thread each
    python benchmarks/distributed.py cuda [--out results.json] [--repeats 3]    all GPUs of the machine; one alone

Whole commands in turns, on the same data: in a subprocess without torchrun, and with it by ddp and by fsdp. A figure
is the median over repeats of tokens over the time between two late steps; the first steps compile and warm up. One
GPU shows what sharing costs where there is nothing to share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from attention_cpu import about

from trainshort.common.machine import cores
from trainshort.data import PrepareConfig
from trainshort.data.prepare import prepare
from trainshort.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "cpu": "--d-model 256 --num-layers 4 --num-heads 4 --length 256 --batch-tokens 4096 --steps 12",
    "cuda": "--model small-124m --length 1024 --batch-tokens 65536 --steps 80",
}
WARM = {"cpu": 3, "cuda": 30}  # steps that are not counted
OTHERS = "--eval-tokens 0 --checkpoint-every 0 --warmup 1"


def contenders(device: str) -> dict[str, tuple[int, str | None]]:
    """By name: processes, and how they share. No processes: without torchrun."""
    count = 2 if device == "cpu" else torch.cuda.device_count()
    found: dict[str, tuple[int, str | None]] = {"plain": (0, None)}
    for processes in sorted({1, count} if device == "cuda" else {count}):
        for kind in ("ddp", "fsdp"):
            found[f"{kind}, {processes}"] = (processes, kind)
    return found


def tokens_per_second(device: str, data: Path, processes: int, kind: str | None) -> tuple[float, float]:
    """And the part of the time that threads waited for a core that others used."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "trainshort", "train", *SIZES[device].split(), *OTHERS.split()]
        words += ["--device", device, "--data", str(data), "--out", f"{folder}/run"]
        command = [sys.executable, *words]
        if processes:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            command = [sys.executable, *launcher, *words, "--parallel", str(kind)]
        threads = "1" if device == "cpu" else str(max(1, cores() // max(1, processes)))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(words)} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
        rows = [row for row in read_metrics(f"{folder}/run") if "loss" in row and row["step"] >= WARM[device]]
        waited = json.loads(Path(f"{folder}/run/state/state.json").read_text())["waiting"]
    first, last = rows[0], rows[-1]
    return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"]), waited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=list(SIZES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commit", help="what is measured (default: ask git)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders(options.device)}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(PrepareConfig(sources=("stdlib",), out=f"{folder}/data"), progress=False)
        for _ in range(options.repeats):
            for name, (processes, kind) in contenders(options.device).items():
                measured[name].append(tokens_per_second(options.device, data, processes, kind))
                print(
                    f"{name:<10} {measured[name][-1][0]:>12,.0f} tokens/s, waited {measured[name][-1][1]:.0%}",
                    flush=True,
                )
    plain = statistics.median(speed for speed, _ in measured["plain"])
    records: list[dict[str, Any]] = []
    for name, figures in measured.items():
        speed = statistics.median(each for each, _ in figures)
        records.append({"name": name, "tokens_per_second": round(speed), "times_plain": round(speed / plain, 3)})
        records[-1]["waiting"] = max(waited for _, waited in figures)
        print(f"{name:<10} {speed:>12,.0f} tokens/s, {speed / plain:.3f} x plain")
    if options.out:
        header = about(1, "distributed") | {"device": options.device, "flags": f"{SIZES[options.device]} {OTHERS}"}
        header |= {"commit": options.commit} if options.commit else {}
        header |= {"machine": torch.cuda.get_device_name()} if options.device == "cuda" else {}
        options.out.write_text(json.dumps({"about": header, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
