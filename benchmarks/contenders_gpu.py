"""What benchmarks/attention_gpu.py compares, and how it measures: calls, times, memory, keys visited."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

import trainshort as ts
from trainshort.ops.problem import DEFAULT_TOLERANCE, Problem
from trainshort.ops.triton import run

HEADS, TOKENS = 16, 16384
FEW_STAGES = {"num_stages": 1}  # with torch's own choice, a lookup in the score_mod does not fit the H200's memory
Call = Callable[..., Tensor]


def inputs(length: int, dim: int, batch: int | None = None) -> list[Tensor]:
    """q, k, v and a gradient of the output."""
    generator = torch.Generator(device="cuda").manual_seed(length + dim)
    shape = (batch or max(1, TOKENS // length), HEADS, length, dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4)]


compiled_flex = torch.compile(flex_attention, dynamic=False)


def causal_mask(length: int) -> BlockMask:
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")


def flex_alibi(length: int, slopes: Tensor) -> Call:
    mask = causal_mask(length)

    def penalty(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j)

    return lambda q, k, v: compiled_flex(q, k, v, score_mod=penalty, block_mask=mask)


def flex_decoding(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, splits: int | None) -> Callable[[], Tensor]:
    """One query after many keys. Its kernel for that shares the keys among programs only if a block mask cuts them
    into blocks; splits: into how many shares, None for its own choice."""
    cached = k.shape[2]
    mask = create_block_mask(lambda b, h, i, j: j < cached, None, None, 1, cached, device="cuda")
    options = {} if splits is None else {"SPLIT_KV": splits}

    def penalty(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (cached - 1 - j)

    return lambda: compiled_flex(q, k, v, score_mod=penalty, block_mask=mask, kernel_options=options)


def flex_buckets(length: int, bias: Any, table: Tensor) -> Call:
    """T5's bucket computed in the score_mod."""
    mask = causal_mask(length)
    exact, last, factor = 16, 31, 16 / math.log(bias.max_distance / 16)

    def penalty(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        steps = torch.where(i >= j, i - j, 0)
        coarse = exact + (torch.log(torch.where(steps > 0, steps, 1).float() / exact) * factor).to(torch.int32)
        bucket = torch.where(steps < exact, steps, torch.where(coarse > last, last, coarse))
        return score + table[bucket, h]

    return lambda q, k, v: compiled_flex(q, k, v, score_mod=penalty, block_mask=mask, kernel_options=FEW_STAGES)


def flex_line(length: int, bias: Any) -> Call:
    """T5's bias looked up by distance, from a line made beforehand: the fastest way with FlexAttention."""
    mask = causal_mask(length)
    line = bias.table.detach().float()[bias.bucket(-torch.arange(length, device="cuda"))].T.contiguous()

    def penalty(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + line[h, torch.where(i >= j, i - j, 0)]

    return lambda q, k, v: compiled_flex(q, k, v, score_mod=penalty, block_mask=mask, kernel_options=FEW_STAGES)


def sdpa(backend: SDPBackend) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def dense_bias(length: int, slopes: Tensor) -> Call:
    place = torch.arange(length, device="cuda")
    distance = (place[:, None] - place[None]).float()
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf")).to(torch.bfloat16)[None]
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def kernel_times(function: Callable[[], object], calls: int = 6) -> dict[str, float]:
    """Milliseconds that each kernel of a call takes, by name: all of its launches, without what lies between them."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    found = {event.key: event.self_device_time_total / calls / 1e3 for event in profiled.key_averages()}
    return {name: time for name, time in found.items() if time > 0.0}


def gpu_time(function: Callable[[], object], calls: int = 6) -> float:
    """Milliseconds of all kernels of a call."""
    return sum(kernel_times(function, calls).values())


def forward_and_backward(call: Call, tensors: list[Tensor], *learned: Tensor) -> Callable[[], object]:
    """A call and its gradients. learned: more tensors whose gradients are asked for."""
    q, k, v, grad = (t.detach() for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    return lambda: torch.autograd.grad(call(*leaves), [*leaves, *learned], grad)


def measure(call: Call, tensors: list[Tensor], *learned: Tensor) -> dict[str, float]:
    """Milliseconds: forward, backward, both. learned: more tensors whose gradients are asked for.

    The best of three medians, for every contender: the host's cores are shared, and short calls wait for it.
    """
    q, k, v, grad = (t.detach() for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    wanted = [*leaves, *learned]

    def timed(function: Callable[[], object]) -> float:
        return min(do_bench(function, warmup=8, rep=20, return_mode="median") for _ in range(3))

    both = forward_and_backward(call, tensors, *learned)
    with torch.no_grad():
        times = {"forward": timed(lambda: call(*leaves)), "forward_gpu": gpu_time(lambda: call(*leaves))}
    out = call(*leaves)
    times["backward"] = timed(lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True))
    times["both"] = timed(both)
    times["both_gpu"] = gpu_time(both)

    def into_leaves() -> None:  # as a training step does it: gradients end up in .grad
        for leaf in wanted:
            leaf.grad = None
        call(*leaves).backward(grad)

    times["both_by_backward"] = timed(into_leaves)
    return {name: round(value, 4) for name, value in times.items()}


def peak(call: Call, tensors: list[Tensor]) -> int:
    """Bytes at the peak of forward and backward beyond inputs, output and gradients."""
    q, k, v, grad = (t.detach() for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(call(*leaves), leaves, grad)
    return torch.cuda.max_memory_allocated() - before - 4 * q.numel() * q.element_size()


def block_mask_bytes(length: int) -> int:
    """What FlexAttention's causal mask takes, made before the call."""
    mask = causal_mask(length)
    parts = (value for value in mask.as_tuple() if isinstance(value, Tensor))
    return sum(part.numel() * part.element_size() for part in parts)


def kept(q: Tensor, k: Tensor, slopes: Tensor) -> dict[str, float]:
    """The share of all tiles of 64 × 64 up to the diagonal that the forward and the backward pass visit."""
    windows = ts.certified_windows(q, k, block=64).long()
    units = windows.shape[2]
    total = windows[..., 0].numel() * (units + 1) / 2
    scale, tolerance = q.shape[-1] ** -0.5, DEFAULT_TOLERANCE[q.dtype]
    problem = Problem(q=q, k=k, v=k, bias=ts.LinearBias(slopes), causal=True, scale=scale, tolerance=tolerance)
    first = run.forward(problem)[2][..., :units]
    backward = torch.arange(1, units + 1, device=q.device) - first
    return {
        "kept": float((windows[..., 1] - windows[..., 0]).sum() / total),
        "kept_backward": float(backward.clamp_min(0).sum() / total),
    }


def contenders(length: int, slopes: Tensor) -> dict[str, Call]:
    calls = {
        "ours": lambda q, k, v: ts.alibi_attention(q, k, v),
        "ours, tolerance 0": lambda q, k, v: ts.alibi_attention(q, k, v, tolerance=0.0),
        "FlexAttention": flex_alibi(length, slopes),
        "cuDNN, no bias": sdpa(SDPBackend.CUDNN_ATTENTION),
        "flash, no bias": sdpa(SDPBackend.FLASH_ATTENTION),
    }
    if length <= 4096:
        calls["SDPA, dense bias"] = dense_bias(length, slopes)
    return calls
