"""Evaluating trained runs at a long length on the CPU, in turns: what certified windows save in the main job.

    trainshort compare --recipe demo
    python benchmarks/evaluation_cpu.py runs/demo/alibi-64-seed0 runs/demo/sinusoidal-64-seed0 [--length 16384]

Each run scores the same tokens in chunks through the cache, as `trainshort evaluate` does; times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from attention_cpu import about

from trainshort.evaluation.config import EvaluateConfig
from trainshort.evaluation.evaluate import evaluate
from trainshort.evaluation.runs import open_run
from trainshort.models import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="the first is compared with the others")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    opened = [open_run(run) for run in options.runs]
    models = [load(run, device="cpu") for run in options.runs]
    config = EvaluateConfig(lengths=(options.length,), tokens=options.length, kept=False)
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(options.repeats):
        for place, model in enumerate(models):
            (record,) = evaluate(model, opened[place].data, config)
            seconds[place].append(record["seconds"])
    kept = EvaluateConfig(lengths=(options.length,), tokens=options.length)
    records = []
    for run, model, times in zip(opened, models, seconds, strict=True):
        (record,) = evaluate(model, run.data, kept)
        middle = statistics.median(times)
        fields = {name: record[name] for name in ("perplexity", "peak_memory_bytes", "kept") if name in record}
        ratio = middle / statistics.median(seconds[0])
        records.append({"run": run.folder.name, "seconds": middle, "times_the_first": round(ratio, 3), **fields})
        print(f"{run.folder.name:<24} {middle:8.2f} s  {ratio:5.2f} x the first", flush=True)
    if options.out:
        shape = models[0].config
        header = about(options.threads, "evaluation_cpu") | {
            "length": options.length,
            "model": f"{shape.num_layers} layers, d_model {shape.d_model}, {shape.num_heads} heads",
        }
        options.out.write_text(json.dumps({"about": header, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
