"""ALiBi attention beside what torch offers, measured in turns on this machine."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainshort.common.machine import Waiting
from trainshort.ops import alibi_attention, alibi_slopes, certified_windows

LEAST = 3  # times that each is measured
WAYS = ("trainshort", "dense bias", "row bias", "no bias")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The inputs that attention is measured on. backward: forward and backward together."""

    length: int
    batch: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    backward: bool

    def tensors(self) -> list[Tensor]:
        """Random q, k and v, the same for every call: [B, H, N, D]."""
        torch.manual_seed(self.length)
        shape = (self.batch, self.heads, self.length, self.head_dim)
        made = (torch.randn(shape, device=self.device).to(self.dtype) for _ in range(3))
        return [tensor.requires_grad_(self.backward) for tensor in made]


def measure(case: Case, *, seconds: float, dense: bool) -> dict[str, Any]:
    """Median milliseconds of each way, None for those that cannot run here, with the reason in `why`.

    seconds: to go on measuring for. dense: whether to try the whole table of biases.
    waiting: the part of the time that threads waited for a core.
    """
    q, k, v = case.tensors()
    grad = torch.randn_like(q) if case.backward else None
    slopes = alibi_slopes(case.heads, case.device)
    ways = _ways(q, k, v, slopes, dense=dense)
    calls = {name: _with_gradients(way, (q, k, v), grad) for name, way in ways.items()}
    why = {} if dense else {"dense bias": "its table would be too large at this length (--dense-up-to)"}
    times: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            _milliseconds(call, case.device)  # warms up
            times[name] = []
        except RuntimeError as error:  # a mask that a kernel does not take, or no memory for it
            if name == "trainshort":
                raise
            why[name] = str(error).strip().splitlines()[0][:100]
    begin, waiting = time.perf_counter(), Waiting()
    while len(times["trainshort"]) < LEAST or time.perf_counter() - begin < seconds:
        for name, found in times.items():
            found.append(_milliseconds(calls[name], case.device))
    share = waiting.share()
    kept = _kept(certified_windows(q.detach(), k.detach(), slopes))
    medians = {name: round(statistics.median(times[name]), 4) if name in times else None for name in WAYS}
    return {"length": case.length, "batch": case.batch, "kept": kept, "ms": medians, "why": why, "waiting": share}


def _ways(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, *, dense: bool) -> dict[str, Callable[[], Tensor]]:
    """What is compared, by name."""
    length = q.shape[2]
    row = (slopes[:, None] * torch.arange(length, device=q.device)).view(1, -1, 1, length).to(q.dtype)
    ways: dict[str, Callable[[], Tensor]] = {"trainshort": lambda: alibi_attention(q, k, v, slopes)}
    if dense:
        table = dense_bias(slopes, length, q.dtype)
        ways["dense bias"] = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=table)
    ways["row bias"] = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=row, is_causal=True)
    ways["no bias"] = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return ways


def _kept(windows: Tensor) -> float:
    """The part of the causal key blocks that windows [B, H, blocks, 2] visit."""
    batch, heads, blocks = windows.shape[:3]
    visited = int((windows[..., 1] - windows[..., 0]).sum())
    return round(visited / (batch * heads * blocks * (blocks + 1) / 2), 4)


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
