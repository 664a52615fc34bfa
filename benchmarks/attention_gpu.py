"""ALiBi attention on a GPU, beside what torch offers there.

    python benchmarks/attention_gpu.py [--out results.json] [--commit HASH] [--steps 300]

Contenders, all in one run: SDPA's flash and cuDNN kernels without any bias, SDPA with a dense bias, compiled
FlexAttention with an ALiBi score_mod, and ours (windows found in the measured time). bfloat16, causal, 16 heads,
16,384 tokens (one row beyond). Times are of calls as a user makes them, the best of three medians, the host's time
included where it is the longer; those that end in `_gpu` are the sums of what the kernels took on the GPU alone.
Inputs: random normal, and q, k, v of every layer of a language model that is trained here for a few hundred steps on
Python's own library.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from contenders_gpu import (
    HEADS,
    TOKENS,
    block_mask_bytes,
    contenders,
    flex_alibi,
    flex_buckets,
    flex_decoding,
    flex_line,
    inputs,
    kept,
    measure,
    peak,
)
from measured import sources_hash
from torch import Tensor
from triton.testing import do_bench_cudagraph

import trainshort as ts

PARTS = ("errors", "records", "decoding", "trained", "buckets")


def say(*words: object) -> None:
    print(f"{time.monotonic() - BEGIN:6.1f}s", *words, flush=True)


BEGIN = time.monotonic()


def random_inputs(lengths: list[int], slopes: Tensor) -> list[dict[str, Any]]:
    records = []
    for dim in (128, 64):
        for length in lengths:
            tensors = inputs(length, dim)
            record: dict[str, Any] = {"length": length, "dim": dim, "ms": {}} | kept(*tensors[:2], slopes)
            calls = contenders(length, slopes)
            for name, call in calls.items():
                record["ms"][name] = measure(call, tensors)
            if length == max(lengths):
                record["peak_bytes"] = {name: peak(calls[name], tensors) for name in ("ours", "FlexAttention")}
                record["peak_bytes"]["FlexAttention's block mask"] = block_mask_bytes(length)
            ours, flex, cudnn = (record["ms"][name] for name in ("ours", "FlexAttention", "cuDNN, no bias"))
            say(
                f"D {dim} N {length}: kept {record['kept']:.3f}, {record['kept_backward']:.3f}; both: "
                f"{flex['both'] / ours['both']:.2f}x flex, {cudnn['both'] / ours['both']:.2f}x cuDNN; on the GPU: "
                f"{flex['both_gpu'] / ours['both_gpu']:.2f}x, {cudnn['both_gpu'] / ours['both_gpu']:.2f}x; "
                f"tolerance 0: {flex['both_gpu'] / record['ms']['ours, tolerance 0']['both_gpu']:.2f}x flex"
            )
            records.append(record)
    return records


def errors(slopes: Tensor) -> dict[str, dict[str, list[float]]]:
    """Relative errors of output, dq, dk and dv against dense float64 attention."""
    found: dict[str, dict[str, list[float]]] = {}
    for dim in (128, 64):
        tensors = inputs(2048, dim, batch=1)
        q, k, v, grad = (t.double() for t in tensors)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = ts.alibi_attention(*leaves, slopes.double(), backend="reference")
        exact = [out, *torch.autograd.grad(out, leaves, grad)]
        found[str(dim)] = {}
        for name, call in contenders(2048, slopes).items():
            if "no bias" in name:
                continue
            leaves = [t.detach().requires_grad_() for t in tensors[:3]]
            out = call(*leaves)
            got = [out, *torch.autograd.grad(out, leaves, tensors[3])]
            found[str(dim)][name] = [
                ((a.detach().double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)
            ]
        say("errors", dim, {name: [f"{x:.2e}" for x in values] for name, values in found[str(dim)].items()})
    return found


def decoding(slopes: Tensor) -> list[dict[str, Any]]:
    """One query after 65,536 cached keys, replayed from a CUDA graph."""
    records = []
    cached, dim = 65536, 128
    for batch in (1, 8):
        q = torch.randn(batch, HEADS, 1, dim, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, HEADS, cached, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        norms = torch.stack([part.float().norm(dim=-1).amax(-1) for part in k.split(8192, dim=2)]).amax(0)

        calls: dict[str, Callable[[], Tensor]] = {
            "ours": lambda q=q, k=k, v=v, norms=norms: ts.alibi_attention(q, k, v, key_norms=norms),
            "ours, without norms": lambda q=q, k=k, v=v: ts.alibi_attention(q, k, v),
            "SDPA, no bias": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
        }
        for splits in (None, 16, 32, 64):
            calls[f"FlexAttention, {splits or 'its own'} shares"] = flex_decoding(q, k, v, slopes, splits)
        with torch.no_grad():
            times = {name: do_bench_cudagraph(call, rep=20, return_mode="median") for name, call in calls.items()}
        times["FlexAttention"] = min(time for name, time in times.items() if name.startswith("FlexAttention"))
        records.append({"batch": batch, "cached": cached, "dim": dim, "ms": times})
        say("decoding", batch, {name: round(value, 4) for name, value in times.items()})
    return records


def buckets() -> list[dict[str, Any]]:
    """T5's bias: forward and backward, without and with the gradient of its table."""
    records = []
    for length in (2048, 16384):
        tensors = inputs(length, 64)
        table = torch.randn(32, HEADS, device="cuda")
        learned = table.clone().requires_grad_()
        bias, learned_bias = ts.BucketBias(table), ts.BucketBias(learned)
        times = {
            "ours": measure(lambda q, k, v, bias=bias: ts.attention(q, k, v, bias=bias), tensors),
            "FlexAttention": measure(flex_buckets(length, bias, table), tensors),
            "FlexAttention, by distance": measure(flex_line(length, bias), tensors),
            "ours, table": measure(
                lambda q, k, v, bias=learned_bias: ts.attention(q, k, v, bias=bias), tensors, learned
            ),
        }
        if length == 2048:  # hundreds of milliseconds: it adds up with atomics
            times["FlexAttention, table"] = measure(flex_buckets(length, bias, learned), tensors, learned)
        records.append({"length": length, "dim": 64, "ms": times})
        say("buckets", length, {name: (round(t["both"], 2), round(t["both_gpu"], 2)) for name, t in times.items()})
    return records


def library_text(limit: int = 12_000_000) -> Tensor:
    """Python's own library as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" not in path.parts and len(text) < limit:
            text += path.read_bytes() + b"\0"
    return torch.frombuffer(text, dtype=torch.uint8).to("cuda", torch.int64)


def trained(steps: int, slopes: Tensor) -> dict[str, Any]:
    """Train a small ALiBi model, and measure attention on its own q, k and v at 16 times its training length."""
    torch.manual_seed(0)
    text, length, dim = library_text(), 1024, 64
    config = ts.ModelConfig(vocab_size=256, d_model=HEADS * dim, num_layers=6, num_heads=HEADS, position="alibi")
    model = ts.LanguageModel(config).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 50) * (1.0 - 0.9 * step / steps)
        starts = torch.randint(0, len(text) - length - 1, (16, 1), device="cuda")
        batch = text[starts + torch.arange(length + 1, device="cuda")]
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            losses.append((step, round(loss.item(), 4)))
    say("trained", losses)
    long = 16 * length
    captured: list[list[Tensor]] = []
    hooks = [
        block.attention.qkv.register_forward_hook(lambda module, args, out: captured.append([out.detach()]))
        for block in model.trunk.blocks
    ]
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        model(text[None, 1_000_000 : 1_000_000 + long], last_only=True)
    for hook in hooks:
        hook.remove()
    layers = []
    flex = flex_alibi(long, slopes)
    for layer, (qkv,) in enumerate(captured):
        qkv = qkv.to(torch.bfloat16).unflatten(-1, (3 * HEADS, dim)).transpose(1, 2)
        q, k, v = (part.contiguous() for part in qkv.chunk(3, dim=1))
        tensors = [q, k, v, torch.randn_like(q)]
        ours = measure(lambda q, k, v: ts.alibi_attention(q, k, v), tensors)
        theirs = measure(flex, tensors)
        ms = {"ours": ours, "FlexAttention": theirs}
        layers.append({"layer": layer, "ms": ms} | kept(q, k, slopes))
        shares = f"{layers[-1]['kept']:.3f}, {layers[-1]['kept_backward']:.3f}"
        say(f"layer {layer}: kept {shares}; {theirs['both_gpu'] / ours['both_gpu']:.2f}x flex")
    return {"steps": steps, "losses": losses, "length": long, "trained_length": length, "dim": dim, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 16384, 65536])
    parser.add_argument("--steps", type=int, default=300, help="of training the model whose q, k and v are measured")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device: for the CPU there is benchmarks/attention_cpu.py")
    torch._dynamo.config.recompile_limit = 64
    slopes = ts.alibi_slopes(HEADS, "cuda")
    about = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": options.commit,
        "sources": sources_hash("attention_gpu"),
        "shapes": f"bfloat16, causal, {HEADS} heads, {TOKENS:,} tokens (one row beyond)",
    }
    results: dict[str, Any] = {"about": about}

    def keep(name: str, value: Any) -> None:
        results[name] = value
        if options.out:  # after every part, so that a run cut short leaves what it has
            options.out.write_text(json.dumps(results, indent=1) + "\n")

    parts: dict[str, Callable[[], Any]] = {
        "errors": lambda: errors(slopes),
        "records": lambda: random_inputs(options.lengths, slopes),
        "decoding": lambda: decoding(slopes),
        "trained": lambda: trained(options.steps, slopes),
        "buckets": buckets,
    }
    for name in options.parts:
        keep(name, parts[name]())


if __name__ == "__main__":
    main()
