"""What ALiBi costs and saves in a whole model on the CPU, beside the same model with other position methods.

    python benchmarks/models_cpu.py [--out results.json]

Questions: a training step at a short length (nothing to skip: what does ALiBi cost?), one decoded token after many
cached ones (what do certified windows save?), and a short text generated; decoding once more beside a process that
keeps a core busy. Contenders alternate in one process; times are medians. Steps of decoding follow one another, some
in a row, as they do when a text is generated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from attention_cpu import about, alternate, busy_neighbour

import trainshort as ts


def model_of(position: str, **changes: int) -> ts.LanguageModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "d_model": 128, "num_layers": 4, "num_heads": 8, **changes}
    return ts.LanguageModel(ts.ModelConfig(position=position, **shape))


def training_step(position: str, length: int, tokens: int) -> Callable[[], object]:
    model = model_of(position)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(0, 256, (tokens // length, length + 1), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model.loss(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()

    return step


STEPS = 16  # of decoding in a row


def decoding_steps(position: str, cached: int) -> Callable[[], object]:
    """Tokens after `cached` others. The cache is filled once and set back after each step."""
    model = model_of(position).eval()
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(0, 256, (1, cached), generator=generator)
    token = torch.randint(0, 256, (1, 1), generator=generator)
    cache = model.make_cache(1, cached + 1)
    with torch.no_grad():
        for part in prompt.split(2048, dim=1):
            model(part, cache=cache, last_only=True)

    @torch.no_grad()
    def steps() -> None:
        for _ in range(STEPS):
            model(token, cache=cache, last_only=True)
            cache.length = cached

    return steps


def generating(position: str, tokens: int) -> Callable[[], object]:
    model = model_of(position).eval()
    prompt = torch.zeros((1, 64), dtype=torch.long)
    return lambda: model.generate(prompt, max_new_tokens=tokens, temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = []

    def compare(question: str, calls: dict[str, Callable[[], object]], steps: int = 1) -> None:
        times = {name: round(value / steps, 3) for name, value in alternate(calls, options.seconds, 5).items()}
        records.append({"question": question, "ms": times})
        print(question, times, flush=True)

    positions = ("none", "alibi", "rotary", "sinusoidal", "t5")
    compare("training step, 32 x 128 tokens", {name: training_step(name, 128, 4096) for name in positions})

    def compare_decoding(where: str = "") -> None:
        for cached in (2048, 8192, 32768):
            calls = {name: decoding_steps(name, cached) for name in ("alibi", "rotary")}
            compare(f"one token after {cached}{where}", calls, STEPS)
        compare(
            f"generating 100 tokens{where}", {name: generating(name, 100) for name in ("alibi", "rotary", "none")}
        )

    compare_decoding()
    with busy_neighbour():
        compare_decoding(", beside a busy process")
    if options.out:
        options.out.write_text(
            json.dumps({"about": about(options.threads, "models_cpu"), "records": records}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
