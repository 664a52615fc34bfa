"""BLOOM and MPT on a GPU: transformers' own models, the same patched, and BLOOM's folder loaded here.

    python benchmarks/public_gpu.py [--out results.json] [--commit HASH] [--parts bloom mpt decoding compiled]

The shapes of bloom-560m and of MPT-7B with random weights in bfloat16, one row. Forward: logits of the last token, no
cache; medians of whole calls, and the peak of memory beyond the weights. Decoding: one token after a context, with a
static cache (eager, and compiled with CUDA graphs) and with one that grows by copying; the loaded model by its own
`generate`. Kept: the share of keys in sight that attention visits. Random weights are not trained ones, whose windows
are longer. Where a model runs out of memory, that is its result.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from measured import sources_hash
from models_gpu import fresh, greedy, say, seconds_of, token_time
from public_cpu import kept_by
from torch import Tensor

import trainshort as ts

BLOOM = {"n_layer": 24, "hidden_size": 1024, "n_head": 16, "vocab_size": 250880}
MPT = {"n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 50432, "max_seq_len": 16384}
ROOM = 256  # of a static cache, beyond the context
PARTS = ("bloom", "mpt", "decoding", "compiled")
Forward = Callable[[Tensor], object]


def made(kind: Any, config: Any) -> Any:
    """A model with random weights, straight onto the GPU."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return kind(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def bloom() -> Any:
    return made(transformers.BloomForCausalLM, transformers.BloomConfig(**BLOOM))


def tokens_of(vocabulary: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (1, length), device="cuda")


def last_logits(model: Any) -> Forward:
    return lambda tokens: model(tokens, use_cache=False, logits_to_keep=1).logits


@torch.no_grad()
def measured(name: str, forward: Forward, tokens: Tensor) -> dict[str, Any]:
    """Seconds of a call, and bytes that it holds at its peak beyond what was there before."""
    record: dict[str, Any] = {"model": name, "length": tokens.shape[1]}
    try:
        forward(tokens)
        fresh()
        before = torch.cuda.memory_allocated()
        record["seconds"] = seconds_of(lambda: forward(tokens), 3)
        record["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        say(f"{name} at {tokens.shape[1]}: {record['seconds']:.3f} s, {record['peak_bytes'] / 2**30:.2f} GiB")
    except torch.OutOfMemoryError:
        record["error"] = "out of memory"
        say(f"{name} at {tokens.shape[1]}: out of memory")
    fresh()
    return record


def bloom_forward() -> dict[str, Any]:
    model, records = bloom(), []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = ts.load(folder, dtype=torch.bfloat16, device="cuda")
    short, long = (tokens_of(BLOOM["vocab_size"], length) for length in (16384, 131072))
    records.append(measured("transformers", last_logits(model), short))
    ts.patch(model)
    for tokens in (short, long):
        records.append(measured("patched", last_logits(model), tokens))
        records.append(measured("loaded", lambda t: loaded(t, last_only=True), tokens))
    kept = {t.shape[1]: kept_by(model, t, use_cache=False, logits_to_keep=1) for t in (short, long)}
    return {"records": records, "kept": kept}


def mpt_forward() -> dict[str, Any]:
    model, records = made(transformers.MptForCausalLM, transformers.MptConfig(**MPT)), []
    held = 16384
    records.append(measured("transformers", last_logits(model), tokens_of(MPT["vocab_size"], held)))
    if "error" in records[-1]:
        held = 8192
        records.append(measured("transformers", last_logits(model), tokens_of(MPT["vocab_size"], held)))
    ts.patch(model)
    kept = {}
    for length in (held, 65536):
        tokens = tokens_of(MPT["vocab_size"], length)
        records.append(measured("patched", last_logits(model), tokens))
        kept[length] = kept_by(model, tokens, use_cache=False, logits_to_keep=1)
    return {"records": records, "kept": kept}


class Steps:
    """One token after another through a cache of transformers, each the likeliest after the one before."""

    def __init__(self, model: Any, call: Any, static: bool, context: int) -> None:
        self.call = call
        self.options: dict[str, Any] = {"use_cache": True}
        if static:
            cache = transformers.StaticCache(config=model.config, max_cache_len=context + ROOM)
        else:
            cache = transformers.DynamicCache(config=model.config)
        self.options["past_key_values"] = cache
        self.token = self.step(tokens_of(BLOOM["vocab_size"], context), model)

    @torch.no_grad()
    def step(self, tokens: Tensor, call: Any) -> Tensor:
        return call(tokens, logits_to_keep=1, **self.options).logits[:, -1:].argmax(-1)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.token = self.step(self.token, self.call)

    def seconds(self, count: int = 40) -> float:
        self.run(10)  # compiles, records graphs
        return min(seconds_of(lambda: self.run(count), 1) for _ in range(3)) / count


def decoding(compiled: bool) -> list[dict[str, Any]]:
    model, records = bloom(), []

    def add(name: str, context: int, seconds: float, kept: float | None = None) -> None:
        records.append({"model": name, "context": context, "ms": seconds * 1e3, "kept": kept})
        say(f"one token, {name}, after {context}: {seconds * 1e3:.3f} ms, kept {kept}")

    caches = {"static cache": True, "dynamic cache": False}
    if not compiled:  # beyond some 30,000 tokens there is no memory for the prompt
        for name, static in caches.items():
            fresh()
            add(f"transformers, {name}", 2048, Steps(model, model, static, 2048).seconds())
    ts.patch(model)
    for context in (2048, 65536):
        fresh()
        if compiled:
            torch._dynamo.reset()
            call = torch.compile(model, mode="reduce-overhead", fullgraph=True)
            add("patched, static cache, compiled", context, Steps(model, call, True, context).seconds())
            continue
        steps = Steps(model, model, True, context)
        seconds = steps.seconds()
        add("patched, static cache", context, seconds, kept_by(model, steps.token, **steps.options))
        del steps
        fresh()
        add("patched, dynamic cache", context, Steps(model, model, False, context).seconds())
    if not compiled:
        records += loaded_decoding(model)
    return records


def loaded_decoding(model: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = ts.load(folder, dtype=torch.bfloat16, device="cuda")
    assert isinstance(loaded, ts.LanguageModel)
    records = []
    for context in (2048, 65536):
        fresh()
        ms = token_time(greedy(loaded, tokens_of(BLOOM["vocab_size"], context))) * 1e3
        records.append({"model": "loaded", "context": context, "ms": ms, "kept": None})
        say(f"one token, loaded, after {context}: {ms:.3f} ms")
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device: for the CPU there is benchmarks/public_cpu.py")
    results: dict[str, Any] = {
        "about": {
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "commit": options.commit,
            "sources": sources_hash("public_gpu"),
        }
    }
    parts: dict[str, Callable[[], Any]] = {
        "bloom": bloom_forward,
        "mpt": mpt_forward,
        "decoding": lambda: decoding(compiled=False),
        "compiled": lambda: decoding(compiled=True),
    }
    began = time.monotonic()
    for name in options.parts:
        fresh()
        results[name] = parts[name]()
        say(f"{name} done after {time.monotonic() - began:.0f} s")
        if options.out:  # after every part, so that a run cut short leaves what it has
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
