"""ALiBi attention beside what torch offers, measured in turns on this machine."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainshort.common.machine import Waiting
from trainshort.ops import alibi_attention, alibi_slopes, certified_windows

LEAST = 3  # times that each is measured
WAYS = ("trainshort", "dense bias", "row bias", "no bias")


def measure(
    length: int,
    *,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    backward: bool,
    seconds: float,
    dense: bool,
) -> dict[str, Any]:
    """Median milliseconds of each way, None for those that cannot run here, with the reason in `why`.

    waiting: the part of the time that threads waited for a core.
    """
    torch.manual_seed(length)
    q, k, v = (
        torch.randn(batch, heads, length, head_dim, device=device).to(dtype).requires_grad_(backward)
        for _ in range(3)
    )
    grad = torch.randn_like(q) if backward else None
    slopes = alibi_slopes(heads, device)
    row = (slopes[:, None] * torch.arange(length, device=device)).view(1, heads, 1, length).to(dtype)
    table = dense_bias(slopes, length, dtype) if dense else None
    ways: dict[str, Callable[[], Tensor]] = {
        "trainshort": lambda: alibi_attention(q, k, v, slopes),
        "dense bias": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=table),
        "row bias": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=row, is_causal=True),
        "no bias": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    why: dict[str, str] = {}
    if not dense:
        del ways["dense bias"]
        why["dense bias"] = "its table would be too large at this length (--dense-up-to)"
    calls = {name: _with_gradients(way, (q, k, v), grad) for name, way in ways.items()}
    times: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            _milliseconds(call, device)  # warms up
            times[name] = []
        except RuntimeError as error:  # a mask that a kernel does not take, or no memory for it
            if name == "trainshort":
                raise
            why[name] = str(error).strip().splitlines()[0][:100]
    begin, waiting = time.perf_counter(), Waiting()
    while len(times["trainshort"]) < LEAST or time.perf_counter() - begin < seconds:
        for name, found in times.items():
            found.append(_milliseconds(calls[name], device))
    share = waiting.share()
    windows = certified_windows(q.detach(), k.detach(), slopes)
    blocks = -(-length // 128)
    kept = int((windows[..., 1] - windows[..., 0]).sum()) / (batch * heads * blocks * (blocks + 1) / 2)
    medians = {name: round(statistics.median(times[name]), 4) if name in times else None for name in WAYS}
    return {"length": length, "batch": batch, "kept": round(kept, 4), "ms": medians, "why": why, "waiting": share}


def dense_bias(slopes: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The whole table [1, H, N, N], as most models build it."""
    index = torch.arange(length, device=slopes.device)
    distance = (index[:, None] - index).to(torch.float32)
    table = (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
    return table.to(dtype)[None]


def _with_gradients(
    way: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad: Tensor | None
) -> Callable[[], object]:
    if grad is None:
        return way
    return lambda: torch.autograd.grad(way(), leaves, grad)


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def about(device: torch.device) -> str:
    """The machine, in words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
