"""A layer's last keys and values, as rings: key j of a head that keeps C of them lies in slot j mod C.

Heads keep different numbers of keys. All of them share one buffer [B, slots, D]; neighbouring heads that keep equally
many are a *run*, whose slots are a plain tensor [B, heads, C, D]. Of a head with capacity C whose keys were first
stored from `first` on, the keys j with max(first, length - C) <= j < length are there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

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
    levels: Tensor | None = None  # under gates: float64 [B, heads, N, G], see Rings

    def part(self, heads: slice) -> Span:
        own = slice(heads.start - self.heads.start, heads.stop - self.heads.start)
        return replace(self, heads=heads, **self._cut(own, slice(None)))

    def first(self, keys: int) -> Span:
        return replace(self, **self._cut(slice(None), slice(0, keys)))

    def after(self, keys: int) -> Span:
        """All but the first so many keys."""
        return replace(self, low=self.low + keys, **self._cut(slice(None), slice(keys, None)))

    def _cut(self, heads: slice, keys: slice) -> dict[str, Any]:
        return {name: tensor[:, heads, keys] for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        named = {"keys": self.keys, "values": self.values, "norms": self.norms}
        return named if self.levels is None else named | {"levels": self.levels}


class Rings:
    """Under gates every slot has a level for each of the G queries of its key's group: the running sum of log gates
    up to its key, and infinity where nothing lies that the next query may see."""

    def __init__(self, like: Tensor, capacities: Sequence[int], first: Sequence[int], group: int = 0) -> None:
        """like: a tensor [B, ..., D] in the dtype and on the device of the keys. group: G, 0 without gates."""
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
            self.levels = None
            if group:
                shape = (like.shape[0], slots, group)
                self.levels = torch.full(shape, math.inf, dtype=torch.float64, device=like.device)

    def buffers(self) -> dict[str, Tensor]:
        named = {"keys": self.keys, "values": self.values, "norms": self.norms}
        return named if self.levels is None else named | {"levels": self.levels}

    def slots_of(self, buffer: Tensor, run: Run) -> Tensor:
        """[B, heads, C, ...]: a run's part of keys, values or norms."""
        return buffer[:, run.slots].unflatten(1, (-1, run.capacity))

    def span(self, run: Run, length: int) -> Span:
        """What is there of a run after so many tokens, in the order of the text."""
        ordered = {name: self.ordered(buffer, run, length) for name, buffer in self.buffers().items()}
        return Span(run.heads, run.low(length), **ordered)

    def ordered(self, buffer: Tensor, run: Run, length: int) -> Tensor:
        """The same of one buffer: [B, heads, N, ...]."""
        low = run.low(length)
        cut = [slice(low % run.capacity, low % run.capacity + length - low)]
        if cut[0].stop > run.capacity:
            cut = [slice(cut[0].start, run.capacity), slice(0, cut[0].stop - run.capacity)]
        view = self.slots_of(buffer, run)
        return view[:, :, cut[0]] if len(cut) == 1 else torch.cat([view[:, :, part] for part in cut], dim=2)

    def store(self, span: Span) -> None:
        """Write keys and values of heads that lie in one run; those that do not fit are left out."""
        run = next(run for run in self.runs if run.heads.start <= span.heads.start < run.heads.stop)
        heads = slice(span.heads.start - run.heads.start, span.heads.stop - run.heads.start)
        count = span.keys.shape[2]
        skip = max(0, count - run.capacity)
        slots = torch.arange(span.low + skip, span.low + count, device=self.keys.device) % run.capacity
        rows = span.tensors()
        for name, buffer in self.buffers().items():
            self.slots_of(buffer, run)[:, heads].index_copy_(2, slots, rows[name][:, :, skip:])
