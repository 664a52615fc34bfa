"""A BLOOM on the CPU: transformers' own, the same model patched, and its folder loaded here.

    python benchmarks/public_cpu.py [--out results.json]

One text through a small shape with random weights in float32, logits of the last token. Time: medians of calls that
alternate in one process. Memory: the largest resident size during a call, beyond that before it. Kept: the share of
keys in sight that attention visits, over all layers; random weights are not trained ones, whose windows are longer.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from attention_cpu import about, alternate, peak_above
from torch import Tensor

import trainshort as ts
from trainshort.integrations import transformers_attention

SHAPE = {"n_layer": 2, "hidden_size": 256, "n_head": 4, "vocab_size": 2048}
SHAPES = "2 layers, 256 wide, 4 heads, vocabulary 2,048, float32, one row"


def kept_by(model: Any, tokens: Tensor, **options: Any) -> float:
    """The share of keys in sight that a patched model visits, over its layers."""
    shares: list[float] = []
    attention = transformers_attention.attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        shares.append(ts.explain(q, k, v, **keywords).keys_visited)
        return attention(q, k, v, **keywords)

    transformers_attention.attention = watched  # type: ignore[assignment]
    try:
        with torch.no_grad():
            model(tokens, **options)
    finally:
        transformers_attention.attention = attention
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    stock: Any = transformers.BloomForCausalLM(transformers.BloomConfig(**SHAPE)).eval()
    patched = ts.patch(copy.deepcopy(stock))
    with tempfile.TemporaryDirectory() as folder:
        stock.save_pretrained(folder)
        loaded = ts.load(folder)
    records = []
    for length in options.lengths:
        tokens = torch.randint(0, SHAPE["vocab_size"], (1, length))
        calls = {
            "transformers": lambda t=tokens: stock(t, use_cache=False, logits_to_keep=1).logits,
            "patched": lambda t=tokens: patched(t, use_cache=False, logits_to_keep=1).logits,
            "loaded": lambda t=tokens: loaded(t, last_only=True),
        }
        with torch.no_grad():
            outputs = {name: call().flatten() for name, call in calls.items()}
            for name in ("patched", "loaded"):
                torch.testing.assert_close(outputs[name], outputs["transformers"], rtol=0, atol=1e-4)
            times = alternate(calls, options.seconds, 3)
            peaks = {name: peak_above(call) for name, call in calls.items()}
        kept = kept_by(patched, tokens, use_cache=False, logits_to_keep=1)
        records.append({"length": length, "ms": times, "peak_megabytes": peaks, "kept": kept})
        print(records[-1], flush=True)
    where = {**about(options.threads, "public_cpu"), "transformers": transformers.__version__, "shapes": SHAPES}
    if options.out:
        options.out.write_text(json.dumps({"about": where, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
