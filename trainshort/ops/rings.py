"""A layer's last keys and values, as rings: key j of a head that keeps C of them lies in slot j mod C.

Heads keep different numbers of keys. All of them share one buffer [B, slots, D]; neighbouring heads that keep equally
many are a *run*, whose slots are a plain tensor [B, heads, C, D]. Of a head with capacity C whose keys were first
stored from `first` on, the keys j with max(first, length - C) <= j < length are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor


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

    def slots_of(self, buffer: Tensor, run: Run) -> Tensor:
        """[B, heads, C, ...]: a run's part of keys, values or norms."""
        return buffer[:, run.slots].unflatten(1, (-1, run.capacity))

    def span(self, run: Run, length: int) -> Span:
        """What is there of a run after so many tokens, in the order of the text."""
        low = run.low(length)
        cut = [slice(low % run.capacity, low % run.capacity + length - low)]
        if cut[0].stop > run.capacity:
            cut = [slice(cut[0].start, run.capacity), slice(0, cut[0].stop - run.capacity)]

        def ordered(buffer: Tensor) -> Tensor:
            view = self.slots_of(buffer, run)
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
            self.slots_of(buffer, run)[:, heads].index_copy_(2, slots, rows[:, :, skip:])
