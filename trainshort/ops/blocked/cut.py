"""From windows to work: cut one attention row into rectangles ("pieces") that one call can compute.

A piece is a range of queries against a range of keys, of one of four kinds:

    tile    keys around the queries: the bias is a small matrix, with -inf where a key is out of sight
    left    keys that lie wholly in the past: bias(query, key) = f(key) + g(query), so it is one row
    right   the mirror image: keys that lie wholly in the future
    still   queries beyond all keys, which count as standing at one position: the bias is one row, without g(query)

Pieces never touch a key outside the window of their query block, and no query of a piece sees none of its
keys, so that each piece has a finite log-sum-exp and pieces of a query can be merged by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from trainshort.ops.bias import Sight
from trainshort.ops.problem import BLOCK, Problem


class Piece(NamedTuple):
    kind: Literal["tile", "left", "right", "still"]
    row: int  # first query
    rows: int
    key: int  # first key
    keys: int
    distance: int  # position of the first key minus position of the first query
    fresh: bool  # no other piece has written these queries yet
    # A tile of two query blocks holds the keys of both windows; what only one of them visits is hidden from
    # the other: `hidden_left` keys from the queries after the first `half`, `hidden_right` from those before.
    half: int = 0
    hidden_left: int = 0
    hidden_right: int = 0

    def is_triangle(self, sight: Sight) -> bool:
        """Whether the queries see the keys at their own places and before, and there are no others."""
        return self.kind == "tile" and sight == "past" and self.distance == 0 and self.rows == self.keys


class Segment(NamedTuple):
    """Queries that share one run of keys: a whole row, or a document of a packed one."""

    batch: int | None  # None: every row of the batch alike
    row: int
    row_end: int
    key: int
    key_end: int
    shift: int  # position of a query among the keys = its index + shift
    still: int | None = None  # or the one position of all of them, beyond all keys (see Problem.positions)


class PieceSizes(NamedTuple):
    """How large pieces may get."""

    rows: int  # queries of a tile: a multiple of BLOCK, or less where there are few
    tile_keys: int  # keys of a tile
    strip_rows: int  # queries that share one left or right piece
    side_keys: int  # keys of a left or right piece


LEAST_STRIP_KEYS = 1024  # a strip of fewer common keys is not worth a merge


def segments(problem: Problem) -> list[Segment]:
    """The runs of queries and keys of a problem. Reads the small tensors that describe them."""
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    if problem.cu_seqlens is not None:
        borders = problem.cu_seqlens.tolist()
        return [Segment(None, low, high, low, high, 0) for low, high in itertools.pairwise(borders) if high > low]
    start = problem.start
    if problem.key_padding_mask is None and not isinstance(start, Tensor):
        return _by_position(Segment(None, 0, queries, 0, keys, start), problem.separable_beyond)
    first, end = (limit.expand(problem.q.shape[0], -1)[:, :1].tolist() for limit in problem.key_runs())
    starts = start.tolist() if isinstance(start, Tensor) else [start] * problem.q.shape[0]
    rows = [Segment(row, 0, queries, first[row][0], end[row][0], starts[row]) for row in range(problem.q.shape[0])]
    return [part for row in rows for part in _by_position(row, problem.separable_beyond)]


def _by_position(segment: Segment, reach: int) -> list[Segment]:
    """Queries in front of all keys, among them and behind them, apart."""
    low, high = segment.key - 1 - reach, segment.key_end + reach
    among = min(max(low + 1 - segment.shift, segment.row), segment.row_end)
    behind = min(max(high - segment.shift, among), segment.row_end)
    parts = [
        segment._replace(row_end=among, still=low),
        segment._replace(row=among, row_end=behind),
        segment._replace(row=behind, still=high),
    ]
    return [part for part in parts if part.row < part.row_end and part.key < part.key_end]


class _Rows(NamedTuple):
    """Queries in a row that visit the same keys."""

    row: int
    end: int
    low: int
    high: int


def cut(
    segment: Segment, sight: Sight, windows: Sequence[Sequence[int]] | None, beyond: int, sizes: PieceSizes
) -> list[Piece]:
    """The pieces of one segment for one head (or for all heads, where they share a window).

    windows: first and one-past-last key block for each query block, or None to visit all that is in sight.
    beyond: how far from the query the bias becomes separable.
    """
    if segment.still is not None:
        return _cut_still(segment, sight, windows, sizes)
    step = sizes.rows if windows is None else min(sizes.rows, BLOCK)
    runs = _runs(segment, sight, windows, step)
    chunks = _paired(runs) if windows is not None and sizes.rows >= 2 * BLOCK else [[run] for run in runs]
    pieces: list[Piece] = []
    strip: list[list[_Rows]] = []
    for chunk in chunks:
        if strip and chunk[-1].end - strip[0][0].row > max(sizes.strip_rows, sizes.rows):
            _cut_strip(pieces, strip, segment.shift, beyond, sizes)
            strip = []
        strip.append(chunk)
    if strip:
        _cut_strip(pieces, strip, segment.shift, beyond, sizes)
    return pieces


def _runs(segment: Segment, sight: Sight, windows: Sequence[Sequence[int]] | None, step: int) -> list[_Rows]:
    """The segment's queries, at most `step` at a time, with the keys in sight of some of them."""
    runs = []
    row = segment.row
    while row < segment.row_end:
        end = min(segment.row_end, (row // step + 1) * step)
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
            runs.append(_Rows(first, last, low, high))
        row = end
    return runs


def _cut_still(
    segment: Segment, sight: Sight, windows: Sequence[Sequence[int]] | None, sizes: PieceSizes
) -> list[Piece]:
    """The pieces of queries that are all beyond their keys, on the same side."""
    assert segment.still is not None
    if sight == ("past" if segment.still < segment.key else "future"):
        return []
    pieces: list[Piece] = []
    runs = _runs(segment._replace(shift=0), "both", windows, BLOCK if windows is not None else sizes.strip_rows)
    for run in runs:
        fresh = True
        for key in range(run.low, run.high, sizes.side_keys):
            keys = min(sizes.side_keys, run.high - key)
            pieces.append(Piece("still", run.row, run.end - run.row, key, keys, key - segment.still, fresh))
            fresh = False
    return pieces


def _paired(runs: list[_Rows]) -> list[list[_Rows]]:
    """Two query blocks at a time, where their windows have most keys in common: larger steps are faster."""
    chunks: list[list[_Rows]] = []
    index = 0
    while index < len(runs):
        pair = runs[index : index + 2]
        if len(pair) == 2:
            one, two = pair
            exact = one.high - one.low + two.high - two.low
            union = 2 * (max(one.high, two.high) - min(one.low, two.low))
            ordered = one.end == two.row and one.low <= two.low and one.high <= two.high
            if not ordered or union > 1.5 * exact:
                pair = pair[:1]
        chunks.append(pair)
        index += len(pair)
    return chunks


def _cut_strip(pieces: list[Piece], strip: list[list[_Rows]], shift: int, beyond: int, sizes: PieceSizes) -> None:
    """Cut chunks that may share one piece on each side: what all of them visit, far from all of them."""
    runs = [run for chunk in strip for run in chunk]
    row, end = runs[0].row, runs[-1].end
    left = (max(run.low for run in runs), row + shift - beyond)
    right = (end + shift + beyond, min(run.high for run in runs))
    contiguous = all(one.end == two.row for one, two in itertools.pairwise(runs))
    together = len(strip) > 1 and contiguous
    together = together and all(max(run.low, left[1]) < min(run.high, right[0]) for run in runs)
    use_left = together and left[1] - left[0] >= LEAST_STRIP_KEYS
    use_right = together and right[1] - right[0] >= LEAST_STRIP_KEYS
    for chunk in strip:
        near = [
            run._replace(
                low=max(run.low, left[1]) if use_left else run.low,
                high=min(run.high, right[0]) if use_right else run.high,
            )
            for run in chunk
        ]
        _cut_chunk(pieces, near, shift, beyond, sizes)
        for run in chunk:
            if use_left:
                _side(pieces, "left", run._replace(high=left[0]), shift, sizes, fresh=False)
            if use_right:
                _side(pieces, "right", run._replace(low=right[1]), shift, sizes, fresh=False)
    if use_left:
        _side(pieces, "left", _Rows(row, end, *left), shift, sizes, fresh=False)
    if use_right:
        _side(pieces, "right", _Rows(row, end, *right), shift, sizes, fresh=False)


def _cut_chunk(pieces: list[Piece], chunk: list[_Rows], shift: int, beyond: int, sizes: PieceSizes) -> None:
    """One tile for the keys around a chunk; where its window is too wide for that, sides beside it."""
    row, end = chunk[0].row, chunk[-1].end
    low, high = min(run.low for run in chunk), max(run.high for run in chunk)
    if high - low <= sizes.tile_keys:
        tile = Piece("tile", row, end - row, low, high - low, low - row - shift, True)
        if len(chunk) == 2:
            one, two = chunk
            tile = tile._replace(half=one.end - one.row, hidden_left=two.low - low, hidden_right=high - one.high)
        pieces.append(tile)
        return
    for run in chunk:
        middle_low = min(max(run.low, run.row + shift - beyond), run.high)
        middle_high = max(min(run.high, run.end + shift + beyond), middle_low)
        fresh = middle_low >= middle_high
        if not fresh:
            keys, distance = middle_high - middle_low, middle_low - run.row - shift
            pieces.append(Piece("tile", run.row, run.end - run.row, middle_low, keys, distance, True))
        fresh = _side(pieces, "left", run._replace(high=middle_low), shift, sizes, fresh)
        _side(pieces, "right", run._replace(low=middle_high), shift, sizes, fresh)


def _side(
    pieces: list[Piece], kind: Literal["left", "right"], run: _Rows, shift: int, sizes: PieceSizes, fresh: bool
) -> bool:
    """Pieces of one side, none where it is empty. Returns whether these queries are still unwritten."""
    for key in range(run.low, run.high, sizes.side_keys):
        keys = min(sizes.side_keys, run.high - key)
        pieces.append(Piece(kind, run.row, run.end - run.row, key, keys, key - run.row - shift, fresh))
        fresh = False
    return fresh
