"""Which pieces go into one kernel call, and how to view tensors for it.

A lane is one head of one row of the batch. A kernel call takes tensors of [X, Y] lanes. Two ways to fill them:

    BatchedCall    the same piece of many lanes: heads that visit everything in their sight
    GatheredCall      pieces of equal shape at different places of one head: heads with windows of their own
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainshort.ops.blocked.cut import Piece

Place = tuple[int, int, int]  # row of the batch, first query, first key


@dataclass(frozen=True)
class BatchedCall:
    """One piece for a range of heads in a range of rows of the batch."""

    piece: Piece
    rows: slice
    heads: slice
    group: int  # query heads that share a key head; above 1, a call holds one row of the batch

    @property
    def lanes(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.heads.stop - self.heads.start)

    def queries(self, tensor: Tensor) -> Tensor:
        """A view of the piece's queries in q-like tensors: [X, Y, R, ...]."""
        return self.arrange(tensor[self.rows, self.heads, self.piece.row : self.piece.row + self.piece.rows])

    def arrange(self, tensor: Tensor) -> Tensor:
        """[rows, heads, ...] -> [X, Y, ...]: grouped queries as [key heads, queries of a group]."""
        if self.group == 1:
            return tensor
        return tensor[0].unflatten(0, (-1, min(self.group, tensor.shape[1])))

    def by_head(self, lanes: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Back from lanes: (rows, heads, [rows, heads, ...])."""
        yield self.rows, self.heads, lanes if self.group == 1 else lanes.flatten(0, 1)[None]

    def _key_heads(self) -> slice:
        first = self.heads.start // self.group
        return slice(first, max(first + 1, self.heads.stop // self.group))

    def keys(self, tensor: Tensor) -> Tensor:
        """A view of the piece's keys in k-like tensors: [X, Y, W, D]."""
        keys = tensor[self.rows, self._key_heads(), self.piece.key : self.piece.key + self.piece.keys]
        if self.group == 1:
            return keys
        return keys[0][:, None].expand(-1, min(self.group, self.heads.stop - self.heads.start), -1, -1)

    def of_keys(self, tensor: Tensor) -> Tensor:
        """A view of the piece's keys in tensors [B, H, Tk] that have a number for each query head: [X, Y, W]."""
        return self.arrange(tensor[self.rows, self.heads, self.piece.key : self.piece.key + self.piece.keys])

    def head_targets(self, tensor: Tensor, lanes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views to write to in such tensors, each with what belongs there."""
        target = tensor[self.rows, self.heads, self.piece.key : self.piece.key + self.piece.keys]
        yield target, lanes if self.group == 1 else lanes.flatten(0, 1)[None]

    def query_targets(self, tensor: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Views to write to, each with the lanes (of Y) that belong there."""
        yield self.queries(tensor), slice(None)

    def key_targets(self, tensor: Tensor, lanes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views to write to in k-like tensors, each with what belongs there, summed over its group."""
        target = tensor[self.rows, self._key_heads(), self.piece.key : self.piece.key + self.piece.keys]
        yield target, lanes if self.group == 1 else lanes.sum(1)[None]


@dataclass(frozen=True)
class GatheredCall:
    """Pieces of equal shape at several places of one head."""

    piece: Piece
    head: int
    group: int
    places: list[Place]

    @property
    def rows(self) -> slice:
        """A row of the batch whose bias all places share."""
        return slice(self.places[0][0], self.places[0][0] + 1)

    @property
    def heads(self) -> slice:
        return slice(self.head, self.head + 1)

    @property
    def lanes(self) -> int:
        return len(self.places)

    def arrange(self, tensor: Tensor) -> Tensor:
        return tensor

    def by_head(self, lanes: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        for index, (row, _, _) in enumerate(self.places):
            yield slice(row, row + 1), self.heads, lanes[:, index : index + 1]

    def queries(self, tensor: Tensor) -> Tensor:
        return _gather(tensor, self.head, [(row, query) for row, query, _ in self.places], self.piece.rows)

    def keys(self, tensor: Tensor) -> Tensor:
        places = [(row, key) for row, _, key in self.places]
        return _gather(tensor, self.head // self.group, places, self.piece.keys)

    def of_keys(self, tensor: Tensor) -> Tensor:
        return _gather(tensor, self.head, [(row, key) for row, _, key in self.places], self.piece.keys)

    def head_targets(self, tensor: Tensor, lanes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for index, (row, _, key) in enumerate(self.places):
            yield tensor[row, self.head, key : key + self.piece.keys], lanes[0, index]

    def query_targets(self, tensor: Tensor) -> Iterator[tuple[Tensor, slice]]:
        places = [(row, query) for row, query, _ in self.places]
        if _viewable(tensor, places):
            yield _view(tensor, self.head, places, self.piece.rows), slice(None)
            return
        for index, place in enumerate(places):
            yield _view(tensor, self.head, [place], self.piece.rows), slice(index, index + 1)

    def key_targets(self, tensor: Tensor, lanes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Place by place, because windows overlap."""
        for index, (row, _, key) in enumerate(self.places):
            yield tensor[row, self.head // self.group, key : key + self.piece.keys], lanes[0, index]


def split_places(places: list[Place], most: int, copy: bool) -> Iterator[list[Place]]:
    """At most `most` places at a time: evenly spaced runs first, which need no copy; then the rest, if `copy`."""
    alone: list[Place] = []
    index = 0
    while index < len(places):
        end = min(index + 2, len(places)) if most > 1 else index + 1
        step = _step(places[index], places[end - 1])
        while end < len(places) and end - index < most and _step(places[end - 1], places[end]) == step:
            end += 1
        if end - index > 2 or most == 1 or not copy:
            yield places[index:end]
        else:
            alone.extend(places[index:end])
        index = end
    for index in range(0, len(alone), most):
        yield alone[index : index + most]


def _step(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(one, two, strict=True))


def _viewable(tensor: Tensor, places: list[tuple[int, int]]) -> bool:
    """Whether one strided view holds all places: evenly spaced, in rising order of memory."""
    if len(places) < 2:
        return True
    steps = {_step(one, two) for one, two in itertools.pairwise(places)}
    row, start = next(iter(steps))
    return len(steps) == 1 and row * tensor.stride(0) + start * tensor.stride(2) > 0


def _view(tensor: Tensor, head: int, places: list[tuple[int, int]], size: int) -> Tensor:
    strides = tensor.stride()
    row, start = places[0]
    step = 0
    if len(places) > 1:
        step = (places[1][0] - row) * strides[0] + (places[1][1] - start) * strides[2]
    offset = tensor.storage_offset() + row * strides[0] + head * strides[1] + start * strides[2]
    return tensor.as_strided((1, len(places), size, *tensor.shape[3:]), (0, step, *strides[2:]), offset)


def _gather(tensor: Tensor, head: int, places: list[tuple[int, int]], size: int) -> Tensor:
    """[1, places, size, ...]: a view where that is possible, else a copy."""
    if _viewable(tensor, places):
        return _view(tensor, head, places, size)
    return torch.stack([tensor[row, head, start : start + size] for row, start in places])[None]
