"""The bias of pieces, and its gradient: one line of numbers by distance, from which every piece takes its part.

Because the bias depends on distance alone, the matrix of a tile has constant diagonals: each of its rows is the
same line, begun one step earlier than the row above. So a tile is a strided view of copies of the line.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainshort.ops.bias import Bias
from trainshort.ops.blocked.calls import BatchedCall, GatheredCall
from trainshort.ops.blocked.cut import Piece
from trainshort.ops.blocked.piece_kernels import Gradients, sums_by_distance
from trainshort.ops.problem import Problem

Call = BatchedCall | GatheredCall


class PieceBias:
    """The bias of every piece that will be computed, for all heads: [B or 1, H, ...]."""

    def __init__(self, problem: Problem, pieces: list[Piece], dtype: torch.dtype) -> None:
        self.bias = problem.bias
        self.batch, self.heads = problem.q.shape[:2]
        self.dtype = dtype
        tiles = [piece for piece in pieces if piece.kind == "tile"]
        self.tile_start = min((piece.distance for piece in tiles), default=0)
        self.tile_end = max((piece.distance + piece.keys for piece in tiles), default=0)
        self.tile_rows = max((piece.rows for piece in tiles), default=1)
        self.line_start = min([self.tile_start - self.tile_rows + 1] + [p.distance - p.rows + 1 for p in pieces])
        line_end = max((piece.distance + piece.keys for piece in pieces), default=0)
        distance = torch.arange(self.line_start, line_end, device=problem.q.device)
        self.line = self._line(problem, distance, dtype)  # [B or 1, H, distances]
        self._tiles: dict[tuple[int, int, int, int], Tensor] = {}
        self._wide = torch.float32 if problem.q.device.type == "mps" else torch.float64  # for long sums
        self.sums: dict[str, Tensor] = {}  # of gradients

    def _line(self, problem: Problem, distance: Tensor, dtype: torch.dtype) -> Tensor:
        if self.bias is None:
            line = problem.q.new_zeros((1, self.heads, len(distance)), dtype=dtype)
        else:
            line = self.bias.at_distance(distance[None, None], dtype).detach()
        for sight, sign in (("past", 1), ("future", -1)):
            heads = [head for head, own in enumerate(problem.sights) if own == sight]
            if len(heads) == self.heads:
                line = line.masked_fill(sign * distance > 0, -math.inf)
            elif heads:
                line[:, heads] = line[:, heads].masked_fill(sign * distance > 0, -math.inf)
        return line.contiguous()

    @property
    def differs_by_row(self) -> bool:
        """Whether rows of the batch have slopes of their own."""
        return self.line.shape[0] > 1

    def straddles(self, call: Call) -> bool:
        """Whether some query may not see all keys of the piece, for a border between them."""
        return False

    def is_one_sided(self, call: Call) -> bool:
        """Whether sums of the gradients of a piece's scores are enough for the gradient of the bias."""
        return False

    def hidden(self, call: Call) -> Tensor | None:
        """Which keys of a piece a border hides from its queries: none."""
        return None

    def mask(self, call: Call, causal: bool) -> Tensor | None:
        """What to add to the scores of a piece: [X, Y, R or 1, W], or None for nothing. causal: the kernel hides the
        future by itself."""
        mask = self._mask(call.piece, call.rows, call.heads)
        return None if mask is None else call.arrange(mask)

    def _mask(self, piece: Piece, rows: slice, heads: slice) -> Tensor | None:
        if not self.differs_by_row:
            rows = slice(0, 1)
        if piece.kind == "tile":
            column = piece.distance - self.tile_start
            tile = self._tile(rows, heads)[:, :, : piece.rows, column : column + piece.keys]
            if piece.hidden_left or piece.hidden_right:
                tile = tile.clone()
                tile[:, :, piece.half :, : piece.hidden_left] = -math.inf
                tile[:, :, : piece.half, piece.keys - piece.hidden_right :] = -math.inf
            return tile
        if self.bias is None:
            return None
        column = piece.distance - self.line_start
        if piece.kind == "right":
            column -= piece.rows - 1
        return self.line[rows, heads, None, column : column + piece.keys]

    def _tile(self, rows: slice, heads: slice) -> Tensor:
        """The bias of tile_rows queries against keys at distances tile_start..tile_end."""
        key = (rows.start, rows.stop, heads.start, heads.stop)
        if key not in self._tiles:
            self._tiles.clear()  # one at a time: they are as large as anything here
            low = self.tile_start - self.tile_rows + 1 - self.line_start
            line = self.line[rows, heads, low : self.tile_end - self.line_start]
            copies = line[:, :, None].expand(-1, -1, self.tile_rows, -1).contiguous()
            shape = (*line.shape[:2], self.tile_rows, self.tile_end - self.tile_start)
            strides = (copies.stride(0), copies.stride(1), line.shape[2] - 1, 1)
            self._tiles[key] = copies.as_strided(shape, strides, copies.storage_offset() + self.tile_rows - 1)
        return self._tiles[key]

    def shift(self, call: Call) -> Tensor | None:
        """On a side: what each query adds to the bias of the one nearest to the keys, [X, Y, R]."""
        piece = call.piece
        if piece.kind in ("tile", "still") or self.bias is None:
            return None
        away = torch.arange(piece.rows, device=self.line.device, dtype=self.dtype)
        if piece.kind == "right":
            away = piece.rows - 1 - away
        shift = self.bias.query_shift(away, ahead=piece.kind == "right")
        if shift is None:
            return None
        return call.arrange(shift[call.rows if shift.shape[0] > 1 else slice(0, 1), call.heads])

    def add_gradients(self, call: Call, gradients: Gradients) -> None:
        """Take in the gradients of a piece's scores, [X, Y, R, W]."""
        assert gradients.scores is not None
        for rows, heads, scores in call.by_head(gradients.scores):
            self._add_gradients(call.piece, rows, heads, scores)

    def _add_gradients(self, piece: Piece, rows: slice, heads: slice, scores: Tensor) -> None:
        if piece.kind == "still":
            by_distance, first = scores.to(self._wide).sum(-2), piece.distance  # [rows, heads, W]
        else:
            by_distance = sums_by_distance(scores).to(self._wide)  # [rows, heads, W + R - 1]
            first = piece.distance - piece.rows + 1
        distance = torch.arange(first, piece.distance + piece.keys, device=scores.device)
        if self.bias is not None:
            self.bias.add_gradients(self._own_sums(self.bias), rows, heads, by_distance, distance)

    def _own_sums(self, bias: Bias) -> dict[str, Tensor]:
        if not self.sums:
            self.sums = bias.gradient_sums(self.batch, self.heads, self._wide)
        return self.sums

    def take(self, sums: dict[str, Tensor], rows: slice, heads: slice) -> None:
        """Take in the sums of another one, for these rows of the batch and these heads."""
        if self.bias is not None:
            for name, found in sums.items():
                self._own_sums(self.bias)[name][rows, heads] += found

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the learned fields of the bias, in their shapes and dtypes."""
        return {} if self.bias is None else self.bias.gradients(self._own_sums(self.bias))
