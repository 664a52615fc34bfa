"""What a bounded cache holds and what it costs: memory by tokens, and logits beside those of tolerance 0.

    python benchmarks/bounded.py [--device cuda] [--tokens 32768] [--train 300] [--out results.json]

One text, the Python library's own source as bytes, is fed to three caches side by side: one that holds and visits
every key (tolerance 0), the ordinary one, and a bounded one. Most of it goes in pieces, the end one token at a time.
Once with random weights and once after some training on the same source: random weights flatter every bound.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from measured import sources_hash
from torch import Tensor

import trainshort as ts
from trainshort.models.bounded import BoundedCache
from trainshort.ops.bias import Bias


class ExactCache(ts.KeyValueCache):
    """Visits every key."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, bias: Bias | None, scale: float) -> Tensor:
        k, v, about = self.append(layer, k, v)
        return ts.attention(q, k, v, bias=bias, scale=scale, tolerance=0.0, **about)


def source(count: int) -> Tensor:
    """So many bytes of the standard library, int64 [1, count]."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= count:
            return torch.tensor(list(found[:count]))[None]
    raise SystemExit(f"the standard library has {len(found)} bytes, fewer than {count}: pass fewer --tokens")


def train(model: ts.LanguageModel, text: Tensor, steps: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros(())
    for _ in range(steps):
        first = torch.randint(text.shape[1] - 257, (16,), generator=generator).tolist()
        batch = torch.cat([text[:, at : at + 257] for at in first])
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def compare(model: ts.LanguageModel, text: Tensor, piece: int, singles: int) -> dict[str, Any]:
    weight = model.trunk.embedding.weight
    exact = ExactCache(model.config, 1, text.shape[1], dtype=weight.dtype, device=weight.device)
    full, bounded = model.make_cache(1, text.shape[1]), model.make_cache(1, bounded=True)
    assert isinstance(bounded, BoundedCache)
    off = {"full": 0.0, "bounded": 0.0}
    seconds = {"exact": 0.0, "full": 0.0, "bounded": 0.0}
    curve = []
    for part in (*text[:, :-singles].split(piece, dim=1), *text[:, -singles:].split(1, dim=1)):
        logits = {}
        for name, cache in (("exact", exact), ("full", full), ("bounded", bounded)):
            begin = time.perf_counter()
            logits[name] = model(part, cache=cache).float()
            seconds[name] += (time.perf_counter() - begin) if part.shape[1] == 1 else 0.0
        for name in off:
            off[name] = max(off[name], float((logits[name] - logits["exact"]).abs().max()))
        report = bounded.report()
        if report.tokens & (report.tokens - 1) == 0 or report.tokens == text.shape[1]:
            curve.append({"tokens": report.tokens, "bytes": report.nbytes, "full_bytes": report.full_bytes})
    report = bounded.report()
    return {
        "largest difference of logits from tolerance 0": off,
        "largest logit": float(logits["exact"].abs().max()),
        "ms a token": {name: round(1000 * spent / max(singles, 1), 3) for name, spent in seconds.items()},
        "share of keys": report.share_of_keys,
        "evictions": report.evictions,
        "reruns": report.reruns,
        "capacities": report.capacities,
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--piece", type=int, default=1024)
    parser.add_argument("--singles", type=int, default=500, help="tokens at the end that are fed one by one")
    parser.add_argument("--train", type=int, default=300, help="steps of 16 x 256 tokens")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    text = source(options.tokens).to(options.device)
    records = []
    for weights in ("random", "trained"):
        torch.manual_seed(0)
        config = ts.ModelConfig(d_model=128, num_layers=4, num_heads=8)
        model = ts.LanguageModel(config).to(options.device)
        loss = train(model, text, options.train) if weights == "trained" else None
        model = model.to(getattr(torch, options.dtype)).eval()
        record = {"weights": weights, "loss": loss, **compare(model, text, options.piece, options.singles)}
        records.append(record)
        print(json.dumps(record), flush=True)
    if options.out:
        about = {key: str(value) for key, value in vars(options).items()} | {"torch": torch.__version__}
        about["sources"] = sources_hash("bounded")
        options.out.write_text(json.dumps({"about": about, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
