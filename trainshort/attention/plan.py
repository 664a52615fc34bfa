"""From windows to work: cut one attention row into rectangles ("pieces") that one call can compute.

A piece is a range of queries against a range of keys, of one of three kinds:

    tile    keys around the queries: the bias is a small matrix, with -inf where a key is out of sight
    left    keys that lie wholly in the past: bias(query, key) = f(key) + g(query), so it is one row
    right   the mirror image: keys that lie wholly in the future

Pieces never touch a key outside the window of their query block, and no query of a piece sees none of its
keys, so that each piece has a finite log-sum-exp and pieces of a query can be merged by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from trainshort.attention.bias import Sight
from trainshort.attention.problem import BLOCK, Problem


class Piece(NamedTuple):
    kind: Literal["tile", "left", "right"]
    row: int  # first query
    rows: int
    key: int  # first key
    keys: int
    distance: int  # position of the first key minus position of the first query
    fresh: bool  # no other piece has written these queries yet


class Segment(NamedTuple):
    """Queries that share one run of keys: a whole row, or a document of a packed one."""

    batch: int | None  # None: every row of the batch alike
    row: int
    row_end: int
    key: int
    key_end: int
    shift: int  # position of a query among the keys = its index + shift


class Shape(NamedTuple):
    """How large pieces may get."""

    rows: int  # queries that share a tile, where they share their window: a multiple of BLOCK
    tile_keys: int  # keys of a tile
    strip_rows: int  # queries that share one left or right piece
    side_keys: int  # keys of a left or right piece


LEAST_STRIP_KEYS = 1024  # a strip of fewer common keys is not worth a merge


def segments(problem: Problem) -> list[Segment]:
    """The runs of queries and keys of a problem. Reads the small tensors that describe them."""
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    if problem.cu_seqlens is not None:
        borders = problem.cu_seqlens.tolist()
        return [
            Segment(None, low, high, low, high, 0)
            for low, high in zip(borders[:-1], borders[1:], strict=True)
            if high > low
        ]
    start = problem.start
    if problem.key_padding_mask is None and not isinstance(start, Tensor):
        return [Segment(None, 0, queries, 0, keys, start)]
    first, end = (limit.expand(problem.q.shape[0], -1)[:, :1].tolist() for limit in problem.key_runs())
    starts = start.tolist() if isinstance(start, Tensor) else [start] * problem.q.shape[0]
    if queries == 0:
        return []
    return [
        Segment(row, 0, queries, first[row][0], end[row][0], starts[row]) for row in range(problem.q.shape[0])
    ]


class _Chunk(NamedTuple):
    """A few queries in a row with the keys they visit."""

    row: int
    end: int
    low: int
    high: int


def cut(
    segment: Segment, sight: Sight, windows: Sequence[Sequence[int]] | None, beyond: int, shape: Shape
) -> list[Piece]:
    """The pieces of one segment for one head (or for all heads, where they share a window).

    windows: first and one-past-last key block for each query block, or None to visit all that is in sight.
    beyond: how far from the query the bias becomes separable.
    """
    rows = shape.rows if windows is None else BLOCK
    chunks = _chunks(segment, sight, windows, rows)
    pieces: list[Piece] = []
    together = max(1, shape.strip_rows // rows)
    for index in range(0, len(chunks), together):
        _cut_strip(pieces, chunks[index : index + together], segment.shift, beyond, shape)
    return pieces


def _chunks(
    segment: Segment, sight: Sight, windows: Sequence[Sequence[int]] | None, rows: int
) -> list[_Chunk]:
    chunks = []
    row = segment.row
    while row < segment.row_end:
        end = min(segment.row_end, (row // rows + 1) * rows)
        low, high = segment.key, segment.key_end
        if sight == "past":
            high = min(high, end + segment.shift)
        if sight == "future":
            low = max(low, row + segment.shift)
        if windows is not None:
            window = windows[row // BLOCK]
            low, high = max(low, window[0] * BLOCK), min(high, window[1] * BLOCK)
        # Queries that see none of these keys are left out.
        first = max(row, low - segment.shift) if sight == "past" else row
        last = min(end, high - segment.shift) if sight == "future" else end
        if low < high and first < last:
            chunks.append(_Chunk(first, last, low, high))
        row = end
    return chunks


def _cut_strip(pieces: list[Piece], chunks: list[_Chunk], shift: int, beyond: int, shape: Shape) -> None:
    row, end = chunks[0].row, chunks[-1].end
    left = (max(chunk.low for chunk in chunks), row + shift - beyond)  # keys in the past of all, seen by all
    right = (end + shift + beyond, min(chunk.high for chunk in chunks))
    contiguous = all(a.end == b.row for a, b in zip(chunks[:-1], chunks[1:], strict=True))
    whole = contiguous and all(max(c.low, left[1]) < min(c.high, right[0]) for c in chunks)
    use_left = whole and left[1] - left[0] >= LEAST_STRIP_KEYS and len(chunks) > 1
    use_right = whole and right[1] - right[0] >= LEAST_STRIP_KEYS and len(chunks) > 1
    for chunk in chunks:
        low, high = chunk.low, chunk.high
        if use_left:
            low = max(low, left[1])
        if use_right:
            high = min(high, right[0])
        _cut_chunk(pieces, chunk._replace(low=low, high=high), shift, beyond, shape, fresh=True)
        if use_left:
            _sides(pieces, "left", chunk.row, chunk.end, chunk.low, left[0], shift, shape, False)
        if use_right:
            _sides(pieces, "right", chunk.row, chunk.end, right[1], chunk.high, shift, shape, False)
    if use_left:
        _sides(pieces, "left", row, end, *left, shift, shape, False)
    if use_right:
        _sides(pieces, "right", row, end, *right, shift, shape, False)


def _cut_chunk(
    pieces: list[Piece], chunk: _Chunk, shift: int, beyond: int, shape: Shape, fresh: bool
) -> None:
    row, end, low, high = chunk
    left, right = low, high
    if high - low > shape.tile_keys:  # too wide for one tile: what lies to the sides is cheaper anyway
        left = min(max(low, row + shift - beyond), high)
        right = max(min(high, end + shift + beyond), left)
    if left < right:
        pieces.append(Piece("tile", row, end - row, left, right - left, left - row - shift, fresh))
        fresh = False
    fresh = _sides(pieces, "left", row, end, low, left, shift, shape, fresh)
    _sides(pieces, "right", row, end, right, high, shift, shape, fresh)


def _sides(
    pieces: list[Piece],
    kind: Literal["left", "right"],
    row: int,
    end: int,
    low: int,
    high: int,
    shift: int,
    shape: Shape,
    fresh: bool,
) -> bool:
    for key in range(low, high, shape.side_keys):
        keys = min(shape.side_keys, high - key)
        pieces.append(Piece(kind, row, end - row, key, keys, key - row - shift, fresh))
        fresh = False
    return fresh
