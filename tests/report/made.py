"""Runs made of files alone, with numbers that can be checked by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LENGTHS = (64, 128, 256)
PERPLEXITIES = {
    "alibi": (5.0, 4.5, 4.0),
    "rotary": (4.0, 6.0, 12.0),
    "t5": (5.5, 5.75, 6.0),
    "sinusoidal": (6.0, 12.0, 24.0),
}
WEIGHTS = "0123456789abcdef" * 4
TOKENS = 1024


def record(length: int, perplexity: float, mode: str = "nonoverlapping", stride: int | None = None) -> dict[str, Any]:
    """As evaluate writes it."""
    total = TOKENS * math.log(perplexity)
    return {
        "length": length,
        "mode": mode,
        "stride": length if stride is None else stride,
        "split": "validation",
        "first_token": 1,
        "end_token": TOKENS + 1,
        "data": "text",
        "nll_sum": total,
        "scored_tokens": TOKENS,
        "words": 200,
        "bytes": TOKENS - 1,
        "perplexity": perplexity,
        "perplexity_per_word": perplexity**2,
        "bits_per_byte": total / math.log(2) / (TOKENS - 1),
        "loss_by_position": {"edges": [0, 1, 4, length], "nll_sum": [6.0, 9.0, 40.0], "count": [2, 6, 40]},
        "seconds": 2.0,
        "fed_tokens": TOKENS,
        "tokens_per_second": TOKENS / 2.0,
        "peak_memory_bytes": 500_000_000 + length,
        "device": "cpu",
        "dtype": "float32",
        "threads": 2,
    }


def skipped(length: int, why: str) -> dict[str, Any]:
    """As evaluate writes it where there is nothing to measure."""
    names = ("length", "mode", "stride", "split", "first_token", "end_token", "data", "dtype")
    return {name: record(length, 2.0)[name] for name in names} | {"skipped": why}


def make_run(
    folder: Path,
    position: str = "alibi",
    *,
    seed: int = 0,
    factor: float = 1.0,
    sliding: bool = False,
    steps: int = 10,
    **train: Any,
) -> Path:
    """A whole run; `factor` multiplies its perplexities."""
    (folder / "state").mkdir(parents=True)
    found = []
    for length, perplexity in zip(LENGTHS, PERPLEXITIES.get(position, PERPLEXITIES["t5"]), strict=True):
        each = record(length, perplexity * factor)
        if position == "alibi":
            share = 64 / length
            each["kept"] = [[share, 1.0], [share, 0.75]]
            each["reach"] = [[32.0, length / 2], [48.0, length / 2]]
            each["farthest"] = [[64.0, length], [64.0, length]]
        found.append(each)
        if sliding:
            found.append(record(length, perplexity * factor * 0.9, "sliding", length // 2))
    config = {
        "position": position,
        "length": 64,
        "seed": seed,
        "steps": steps,
        "batch_tokens": 128,
        "lr": 0.003,
    } | train
    write(folder / "train.json", config)
    model = {"position": position, "num_layers": 2, "num_heads": 2, "d_model": 16, "position_options": {}}
    write(folder / "config.json", {"format": "trainshort", "version": 1, "kind": "LanguageModel", "model": model})
    state = {
        "seconds": 3.5,
        "config": config,
        "data": {"identity": "text"},
        "environment": {"torch": "2.13.0", "device": "cpu", "threads": 1},
        "files": {"model": {"sha256": WEIGHTS}},
    }
    write(folder / "state" / "state.json", state)
    evaluation = {"format": "trainshort evaluation", "version": 1, "model": WEIGHTS[:16], "records": found}
    write(folder / "evaluation.json", evaluation)
    rows = [
        {"step": step, "loss": 6.0 / step, "seconds": step / 4, "tokens": 128 * step} for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_runs(folder: Path, **more: Any) -> list[Path]:
    """Four methods, as compare leaves them."""
    return [make_run(folder / f"{position}-64-seed0", position, **more) for position in PERPLEXITIES]


def write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values))


def change(path: Path, **values: Any) -> None:
    write(path, json.loads(path.read_text()) | values)
