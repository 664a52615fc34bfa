"""A layer's last keys and values, as rings: key j of a head that keeps C of them lies in slot j mod C.

Heads keep different numbers of keys. All of them share one buffer [B, slots, D]; neighbouring heads that keep equally
many are a *run*, whose slots are a plain tensor [B, heads, C, D]. Of a head with capacity C whose keys were first
stored from `first` on, the keys j with max(first, length - C) <= j < length are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops.blocked import piece_kernels
from trainshort.ops.threads import one_thread

LITTLE = 2**16  # numbers of the keys to read, below which one thread is as fast as several


class Run(NamedTuple):
    """Neighbouring key heads that are stored alike."""

    heads: slice
    capacity: int
    first: int
    slots: slice

    def low(self, length: int) -> int:
        """The first key that is there after so many tokens."""
        return max(self.first, length - self.capacity)


@dataclass
class Span:
    """Keys and values of neighbouring heads in the order of the text, from key `low` on."""

    heads: slice
    low: int
    keys: Tensor  # [B, heads, N, D]
    values: Tensor
    norms: Tensor  # [B, heads, N]

    def part(self, heads: slice) -> Span:
        own = slice(heads.start - self.heads.start, heads.stop - self.heads.start)
        return Span(heads, self.low, self.keys[:, own], self.values[:, own], self.norms[:, own])

    def first(self, keys: int) -> Span:
        return replace(
            self, keys=self.keys[:, :, :keys], values=self.values[:, :, :keys], norms=self.norms[:, :, :keys]
        )

    def after(self, keys: int) -> Span:
        """All but the first so many keys."""
        return Span(
            self.heads, self.low + keys, self.keys[:, :, keys:], self.values[:, :, keys:], self.norms[:, :, keys:]
        )


class Padding(NamedTuple):
    """Leading tokens of each row that are none."""

    tokens: Tensor  # int64 [B]
    most: int


class Rings:
    def __init__(self, like: Tensor, capacities: Sequence[int], first: Sequence[int]) -> None:
        """like: a tensor [B, ..., D] in the dtype and on the device of the keys."""
        self.capacities, self.first = list(capacities), list(first)
        self.runs: list[Run] = []
        self.offsets: list[int] = []
        head = slots = 0
        for (capacity, begin), each in groupby(zip(capacities, first, strict=True)):
            count = len(list(each))
            self.offsets += [slots + index * capacity for index in range(count)]
            end = slots + count * capacity
            self.runs.append(Run(slice(head, head + count), capacity, begin, slice(slots, end)))
            head, slots = head + count, end
        with torch.inference_mode(False):  # these may be written to in other modes than the one they are made in
            self.keys = torch.zeros((like.shape[0], slots, like.shape[-1]), dtype=like.dtype, device=like.device)
            self.values = torch.zeros_like(self.keys)
            self.norms = torch.zeros((like.shape[0], slots), dtype=torch.float32, device=like.device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.norms.nbytes

    def _view(self, buffer: Tensor, run: Run) -> Tensor:
        return buffer[:, run.slots].unflatten(1, (-1, run.capacity))

    def span(self, run: Run, length: int) -> Span:
        """What is there of a run after so many tokens, in the order of the text."""
        low = run.low(length)
        cut = [slice(low % run.capacity, low % run.capacity + length - low)]
        if cut[0].stop > run.capacity:
            cut = [slice(cut[0].start, run.capacity), slice(0, cut[0].stop - run.capacity)]

        def ordered(buffer: Tensor) -> Tensor:
            view = self._view(buffer, run)
            return view[:, :, cut[0]] if len(cut) == 1 else torch.cat([view[:, :, part] for part in cut], dim=2)

        return Span(run.heads, low, ordered(self.keys), ordered(self.values), ordered(self.norms))

    def store(self, span: Span) -> None:
        """Write keys and values of heads that lie in one run; those that do not fit are left out."""
        run = next(run for run in self.runs if run.heads.start <= span.heads.start < run.heads.stop)
        heads = slice(span.heads.start - run.heads.start, span.heads.stop - run.heads.start)
        count = span.keys.shape[2]
        skip = max(0, count - run.capacity)
        slots = torch.arange(span.low + skip, span.low + count, device=self.keys.device) % run.capacity
        for buffer, rows in ((self.keys, span.keys), (self.values, span.values), (self.norms, span.norms)):
            self._view(buffer, run)[:, heads].index_copy_(2, slots, rows[:, :, skip:])

    def append(self, slots: Tensor, keys: Tensor, values: Tensor, norms: Tensor) -> Tensor:
        """Write one token's keys and values [B, Hkv, D] to these slots [Hkv]; returns the norms that stood there."""
        before = self.norms.index_select(1, slots)
        self.keys.index_copy_(1, slots, keys)
        self.values.index_copy_(1, slots, values)
        self.norms.index_copy_(1, slots, norms)
        return before

    def attend(
        self, q: Tensor, position: int, scale: float, lines: Lines, padding: Padding | None
    ) -> tuple[Tensor, ...]:
        """Output [B, H, D] and log-sum-exp [B, H] of the last token's query q [B, H, D], over all keys there."""
        group = q.shape[1] // len(self.capacities)
        parts = []
        read = sum(min(run.capacity, position + 1) * (run.heads.stop - run.heads.start) for run in self.runs)
        with one_thread() if read * q.shape[0] * q.shape[2] <= LITTLE else nullcontext():
            for run in self.runs:
                grouped = q[:, run.heads.start * group : run.heads.stop * group].unflatten(1, (-1, group))
                parts.append(self._attend_run(grouped, run, position, scale, lines, padding))
            outs, sums = zip(*parts, strict=True)
            return torch.cat(outs, 1).flatten(1, 2), torch.cat(sums, 1).flatten(1, 2)

    def _attend_run(
        self, q: Tensor, run: Run, position: int, scale: float, lines: Lines, padding: Padding | None
    ) -> tuple[Tensor, Tensor]:
        """q: [B, heads, G, D] -> output like it, log-sum-exp [B, heads, G]."""
        keys, values = self._view(self.keys, run), self._view(self.values, run)
        low, last = run.low(position + 1), position % run.capacity
        first = low % run.capacity
        wrapped = position + 1 - low < run.capacity and first > last
        fused = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and piece_kernels.has_fused()
        hidden = padding is not None and padding.most > low
        if wrapped or hidden or not fused:
            return _attend_masked(q, keys, values, scale, lines, run, position, padding)
        if position + 1 - low == run.capacity:
            first, last = 0, run.capacity - 1
        bias = lines.bias(run, position % run.capacity, slice(first, last + 1))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys[:, :, first : last + 1], values[:, :, first : last + 1], 0.0, False, attn_mask=bias, scale=scale
        )


class Lines:
    """The bias of the slots of rings, for any last slot: a slice of one line a head, [heads, G, 2 C - 1].

    Slot s of a ring whose last key lies in slot r is (r - s) mod C tokens away.
    """

    def __init__(self, slopes: Tensor, kv_heads: int, dtype: torch.dtype) -> None:
        """slopes: [H]."""
        self.slopes, self.dtype = slopes.unflatten(0, (kv_heads, -1)), dtype
        self.lines: dict[tuple[int, int, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(line.nbytes for line in self.lines.values())

    def bias(self, run: Run, last: int, slots: slice) -> Tensor:
        """[1, heads, G, slots]."""
        key = (run.heads.start, run.heads.stop, run.capacity)
        line = self.lines.get(key)
        if line is None:
            with torch.inference_mode(False):
                steps = torch.arange(run.capacity - 1, -run.capacity, -1, device=self.slopes.device) % run.capacity
                line = (-self.slopes[run.heads, :, None].double() * steps).to(self.dtype)[None]
            self.lines[key] = line
        shift = run.capacity - 1 - last
        return line[..., shift + slots.start : shift + slots.stop]

    def forget(self) -> None:
        self.lines.clear()


def _attend_masked(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    lines: Lines,
    run: Run,
    position: int,
    padding: Padding | None,
) -> tuple[Tensor, Tensor]:
    """The same in plain operations, where some slots hold nothing that this row may see."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    slots = torch.arange(run.capacity, device=q.device)
    index = position - (position - slots) % run.capacity  # of the key in each slot
    there = (index >= run.low(position + 1))[None]
    if padding is not None:
        there = there & (index >= padding.tokens[:, None])
    bias = lines.bias(run, position % run.capacity, slice(0, run.capacity)).to(dtype)
    scores = q.to(dtype) @ keys.to(dtype).transpose(-1, -2) * scale + bias
    scores = scores.masked_fill(~there[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse > float("-inf"), lse, 0.0)[..., None])
    return (weights @ values.to(dtype)).to(q.dtype), lse
