"""Attention in pure torch with linear memory, forward and backward, on any device.

Each query block visits exactly the key blocks of its certified window, cut into pieces (plan.py) that are
computed one or several at a time (pieces.py) and merged by their log-sum-exp. Heads whose window is
everything in sight share their pieces; the others go lane by lane (a lane is one head of one row), pieces of
equal shape together. The backward pass cuts the same windows, so it skips exactly what the forward skipped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainshort.attention import pieces as engine
from trainshort.attention.bias import BucketBias, LinearBias
from trainshort.attention.plan import Piece, Segment, Shape, cut, segments
from trainshort.attention.problem import BLOCK, Problem
from trainshort.attention.windows import certified_blocks, visible_blocks

LARGEST_TILE = 3072  # keys of a bias tile, so that it stays in a core's cache
TILE_ROWS = 256  # torch's CPU kernel takes larger steps from 192 queries on,
STRIP_ROWS = 1024  # and its largest from 768 on
TOGETHER = 2**21  # elements of keys that the pieces of one call may hold
LARGEST_GATHER = 2048  # wider pieces are cheaper one by one than copied together


def gradient_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised, of the tensor's shape, in the memory layout of gradients: the heads of a token together."""
    batch, heads, length, dim = tensor.shape
    return tensor.new_empty((batch, length, heads, dim), dtype=dtype).transpose(1, 2)


def windows_of(problem: Problem) -> Tensor | None:
    """The certified windows that this backend will use, or None where it visits everything."""
    if problem.tolerance <= 0.0 or not isinstance(problem.bias, LinearBias):
        return None
    if problem.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # reading windows back would break the capture
    return certified_blocks(problem)


def forward(problem: Problem, windows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output, in the shape and dtype of q, and log-sum-exp [B, H, Tq] of the scores of visited keys."""
    try:
        out, lse = _Run(problem, windows, fused=_can_fuse(problem)).forward()
    except engine.Suspicious:
        out, lse = _Run(problem, windows, fused=False).forward()
    result = torch.empty_like(problem.q)  # in the memory layout of q
    if out.dtype == result.dtype and out.stride() == result.stride():
        return out, lse.contiguous()
    return result.copy_(out), lse.contiguous()


@dataclass
class BiasGradients:
    past: Tensor | None = None
    future: Tensor | None = None
    table: Tensor | None = None


def backward(
    problem: Problem, windows: Tensor | None, out: Tensor, lse: Tensor, grad: Tensor, want_bias: bool
) -> tuple[Tensor, Tensor, Tensor, BiasGradients]:
    """Gradients of q, k, v and, if wanted, of the bias."""
    fused = _can_fuse(problem) and not want_bias and bool(torch.isfinite(lse).all())
    run = _Run(problem, windows, fused=fused)
    dq, dk, dv = run.backward(out, lse, grad, want_bias)
    dq, dk, dv = (gradient.to(problem.q.dtype) for gradient in (dq, dk, dv))
    return dq, dk, dv, run.bias_gradients()


def _can_fuse(problem: Problem) -> bool:
    return problem.q.device.type == "cpu" and engine.has_fused()


@dataclass(frozen=True)
class _Group:
    """Heads of some rows that share their pieces, seen as [X, Y] lanes."""

    rows: slice  # of the batch
    heads: slice


class _Run:
    """One pass over one problem."""

    def __init__(self, problem: Problem, windows: Tensor | None, fused: bool) -> None:
        self.fused = fused
        self.dtype = problem.accumulate_dtype
        q, k, v = (self._usable(t.detach()) for t in (problem.q, problem.k, problem.v))
        self.problem = replace(problem, q=q, k=k, v=v)
        self.q, self.k, self.v = q, k, v
        self.batch, self.heads, self.queries, self.dim = q.shape
        self.group = self.heads // k.shape[1]
        self.beyond = 0 if problem.bias is None else problem.bias.separable_beyond
        self.shape = self._piece_shape()
        self.segments = segments(problem) if k.shape[2] else []
        self.windows = windows
        self.whole_heads = self._whole_heads()
        self.past, self.future = (slope.detach() for slope in problem.slopes(self.dtype))
        self.line: Tensor | None = None
        self.tiles: dict[tuple, Tensor] = {}
        self.dpast = self.dfuture = self.dtable = None

    def _usable(self, tensor: Tensor) -> Tensor:
        """In the dtype of the arithmetic, rows contiguous and apart, as the kernels need them."""
        tensor = tensor.to(self.dtype)
        rows_apart = tensor.stride(-1) == 1 and tensor.stride(-2) >= tensor.shape[-1]
        return tensor if rows_apart else tensor.contiguous()

    def _piece_shape(self) -> Shape:
        """Pieces whose bias and scores never outgrow the inputs, whatever the length."""
        length = max(self.queries, self.k.shape[2], 1)
        share = self.q.numel() // (self.heads * TILE_ROWS)  # keys of a tile that is as large as q
        if not self.fused:
            keys = max(BLOCK, share // max(1, self.batch))
            return Shape(BLOCK, keys, BLOCK, keys)
        keys = max(share, length * length // (8 * TILE_ROWS), TILE_ROWS)
        keys = min(keys, LARGEST_TILE) // TILE_ROWS * TILE_ROWS
        return Shape(TILE_ROWS, keys, min(STRIP_ROWS, keys), length)

    def _whole_heads(self) -> list[bool]:
        """Which heads visit all that is in their sight, in every row of the batch."""
        if self.windows is None:
            return [True] * self.heads
        low, high = visible_blocks(self.problem, BLOCK)
        everything = torch.stack((low, high), dim=-1)
        everything = everything.masked_fill((high <= low)[..., None], 0)
        return (self.windows == everything).flatten(2).all(-1).all(0).tolist()

    # Which pieces, on which lanes

    def _groups(self) -> Iterator[tuple[_Group, list[Piece]]]:
        """Heads that visit everything, a slab at a time."""
        sights = self.problem.sights
        runs: list[list[int]] = []
        for head in range(self.heads):
            if not self.whole_heads[head]:
                continue
            if runs and runs[-1][1] == head and sights[runs[-1][0]] == sights[head]:
                runs[-1][1] = head + 1
            else:
                runs.append([head, head + 1])
        widest = min(self.shape.tile_keys, self.k.shape[2])
        most = max(1, self.q.numel() // (TILE_ROWS * widest))
        for first, end in runs:
            step = max(most // self.group * self.group, 1) if self.group > 1 else most
            if self.group > 1 and (first % self.group or end % self.group or step % self.group):
                step = 1
            for head in range(first, end, step):
                heads = slice(head, min(end, head + step))
                for segment in self.segments:
                    pieces = cut(segment, sights[head], None, self.beyond, self.shape)
                    for rows in self._batches(segment):
                        yield _Group(rows, heads), pieces

    def _batches(self, segment: Segment) -> list[slice]:
        if segment.batch is not None:
            return [slice(segment.batch, segment.batch + 1)]
        if self.group > 1 or self.past.shape[0] > 1 or self.future.shape[0] > 1:
            return [slice(row, row + 1) for row in range(self.batch)]
        return [slice(0, self.batch)]

    def _lanes(self) -> dict[tuple, list[tuple[int, int, int]]]:
        """Pieces of heads with windows: (head, piece at row 0 and key 0) -> its (batch, row, key) places."""
        lanes: dict[tuple, list[tuple[int, int, int]]] = defaultdict(list)
        if all(self.whole_heads) or self.windows is None:
            return lanes
        windows = self.windows.tolist()
        sights = self.problem.sights
        by_slope = self.past.shape[0] > 1 or self.future.shape[0] > 1
        for row in range(self.batch):
            own = [s for s in self.segments if s.batch is None or s.batch == row]
            for head in range(self.heads):
                if self.whole_heads[head]:
                    continue
                for segment in own:
                    for piece in cut(segment, sights[head], windows[row][head], self.beyond, self.shape):
                        key = (head, row if by_slope else 0, piece._replace(row=0, key=0))
                        lanes[key].append((row, piece.row, piece.key))
        return dict(sorted(lanes.items(), key=lambda item: not item[0][2].fresh))

    def _calls(self, piece: Piece, places: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
        """Split places into calls: evenly spaced ones can be viewed together, others are copied together."""
        most = max(2, TOGETHER // (piece.keys * self.dim))
        most = min(most, max(1, self.k.numel() // (piece.keys * self.dim)))
        alone: list[tuple[int, int, int]] = []
        index = 0
        while index < len(places):
            end = min(index + 2, len(places)) if most > 1 else index + 1
            step = _step(places[index], places[end - 1])
            while end < len(places) and end - index < most and _step(places[end - 1], places[end]) == step:
                end += 1
            if end - index > 2 or most == 1 or piece.keys > LARGEST_GATHER:
                yield places[index:end]
            else:
                alone.extend(places[index:end])
            index = end
        for index in range(0, len(alone), most):
            yield alone[index : index + most]

    # Views

    def _rows(self, tensor: Tensor, group: _Group, piece: Piece) -> Tensor:
        tensor = tensor[group.rows, group.heads, piece.row : piece.row + piece.rows]
        return tensor if self.group == 1 else self._as_groups(tensor)

    def _as_groups(self, tensor: Tensor) -> Tensor:
        heads = tensor.shape[1]
        return tensor[0].unflatten(0, (max(1, heads // self.group), min(heads, self.group)))

    def _keys(self, tensor: Tensor, group: _Group, piece: Piece) -> Tensor:
        keys = slice(piece.key, piece.key + piece.keys)
        if self.group == 1:
            return tensor[group.rows, group.heads, keys]
        first, count = group.heads.start // self.group, group.heads.stop - group.heads.start
        lanes = tensor[group.rows.start, first : first + max(1, count // self.group), None, keys]
        return lanes.expand(-1, min(count, self.group), -1, -1)

    def _lane_view(self, tensor: Tensor, head: int, places: list[tuple[int, int]], size: int) -> Tensor:
        """[1, n, size, ...]: rows or keys of one head at several evenly spaced (batch, start) places."""
        strides = tensor.stride()
        row, start = places[0]
        step = 0
        if len(places) > 1:
            step = (places[1][0] - row) * strides[0] + (places[1][1] - start) * strides[2]
        offset = tensor.storage_offset() + row * strides[0] + head * strides[1] + start * strides[2]
        shape = (1, len(places), size, *tensor.shape[3:])
        return tensor.as_strided(shape, (0, step, *strides[2:]), offset)

    def _lane_copy(self, tensor: Tensor, head: int, places: list[tuple[int, int]], size: int) -> Tensor:
        if _evenly_spaced(places) and _ascending(tensor, places):
            return self._lane_view(tensor, head, places, size)
        return torch.stack([tensor[row, head, start : start + size] for row, start in places])[None]

    # The bias of a piece

    def _prepare_bias(self, every_piece: list[Piece]) -> None:
        """The bias at every distance that occurs, as one line [B or 1, H, distances]."""
        tiles = [p for p in every_piece if p.kind == "tile"]
        self.tile_start = min((p.distance for p in tiles), default=0)
        self.tile_end = max((p.distance + p.keys for p in tiles), default=0)
        self.tile_rows = max((p.rows for p in tiles), default=1)
        self.line_start = min((p.distance - p.rows + 1 for p in every_piece), default=0)
        self.line_start = min(self.line_start, self.tile_start - self.tile_rows + 1)
        line_end = max((p.distance + p.keys for p in every_piece), default=0)
        distance = torch.arange(self.line_start, line_end, device=self.q.device)
        bias = self.problem.bias
        if isinstance(bias, BucketBias):
            line = bias.table.detach().to(self.dtype)[bias.bucket(distance)].T[None]
        elif isinstance(bias, LinearBias):
            line = bias.at(distance.to(self.dtype), self.past[..., None], self.future[..., None])
        else:
            line = self.q.new_zeros((1, self.heads, len(distance)))
        for sight, sign in (("past", 1), ("future", -1)):
            blind = [head for head, own in enumerate(self.problem.sights) if own == sight]
            if blind:
                hidden = torch.zeros(self.heads, dtype=torch.bool, device=line.device)
                hidden[blind] = True
                line = line.masked_fill(hidden[:, None] & (sign * distance > 0), -math.inf)
        self.line = line.contiguous()

    def _tile(self, rows: slice, heads: slice) -> Tensor:
        """The bias of tile_rows queries against distances tile_start..tile_end, [rows, heads, R, W]."""
        assert self.line is not None
        key = (rows.start, rows.stop, heads.start, heads.stop)
        if key not in self.tiles:
            self.tiles.clear()  # one at a time: they are as large as anything here
            low = self.tile_start - self.tile_rows + 1 - self.line_start
            line = self.line[rows, heads, low : self.tile_end - self.line_start]
            self.tiles[key] = line.unfold(-1, self.tile_end - self.tile_start, 1).flip(-2).contiguous()
        return self.tiles[key]

    def _mask(self, piece: Piece, rows: slice, heads: slice) -> Tensor | None:
        """The bias of a piece for some rows of the batch and heads: [rows, heads, R or 1, W]."""
        assert self.line is not None
        if self.line.shape[0] == 1:
            rows = slice(0, 1)
        if piece.kind == "tile":
            column = piece.distance - self.tile_start
            return self._tile(rows, heads)[:, :, : piece.rows, column : column + piece.keys]
        if self.problem.bias is None:
            return None
        column = piece.distance - self.line_start
        if piece.kind == "right":
            column -= piece.rows - 1
        return self.line[rows, heads, None, column : column + piece.keys]

    def _shift(self, piece: Piece, rows: slice, heads: slice) -> Tensor | None:
        """What the bias of a query adds to that of the piece's reference query: [rows, heads, R]."""
        if piece.kind == "tile" or not isinstance(self.problem.bias, LinearBias):
            return None
        slope = self.past if piece.kind == "left" else self.future
        index = torch.arange(piece.rows, device=self.q.device, dtype=self.dtype)
        away = index if piece.kind == "left" else piece.rows - 1 - index
        rows = rows if slope.shape[0] > 1 else slice(0, 1)
        return -slope[rows, heads, None] * away

    # The passes

    def _work(self):
        groups = [(group, piece) for group, pieces in self._groups() for piece in pieces]
        lanes = self._lanes()
        self._prepare_bias([piece for _, piece in groups] + [key[2] for key in lanes])
        return groups, lanes

    def _single_call(self, groups: list[tuple[_Group, Piece]], lanes: dict) -> tuple[_Group, Piece] | None:
        """The one piece that is the whole problem, if it is."""
        if len(groups) != 1 or lanes or self.group > 1:
            return None
        group, piece = groups[0]
        heads, rows = group.heads.stop - group.heads.start, group.rows.stop - group.rows.start
        whole = (heads, rows, piece.rows, piece.keys) == (self.heads, self.batch, self.queries, self.k.shape[2])
        return (group, piece) if whole and piece.kind == "tile" else None

    def forward(self) -> tuple[Tensor, Tensor]:
        groups, lanes = self._work()
        run_piece = engine.fused_forward if self.fused else engine.plain_forward
        scale = self.problem.scale
        if direct := self._single_call(groups, lanes):
            group, piece = direct
            mask = self._lane_axes(self._mask(piece, group.rows, group.heads))
            return run_piece(self.q, self.k, self.v, mask, scale)
        out = torch.empty_like(self.q)
        lse = torch.empty(self.q.shape[:3], dtype=self.dtype, device=self.q.device)
        written = sum(
            piece.rows * (group.rows.stop - group.rows.start) * (group.heads.stop - group.heads.start)
            for group, piece in groups
            if piece.fresh
        ) + sum(key[2].rows * len(places) for key, places in lanes.items() if key[2].fresh)
        if written < lse.numel():  # queries that see no key
            out.zero_()
            lse.zero_()
        for group, piece in groups:
            mask, shift = (self._lane_axes(f(piece, group.rows, group.heads)) for f in (self._mask, self._shift))
            more, more_lse = run_piece(
                self._rows(self.q, group, piece),
                self._keys(self.k, group, piece),
                self._keys(self.v, group, piece),
                mask,
                scale,
            )
            if shift is not None:
                more_lse = more_lse + shift
            self._store(self._rows(out, group, piece), self._rows(lse, group, piece), more, more_lse, piece.fresh)
        for (head, row, piece), all_places in lanes.items():
            rows, heads = slice(row, row + 1), slice(head, head + 1)
            mask, shift = self._mask(piece, rows, heads), self._shift(piece, rows, heads)
            for places in self._calls(piece, all_places):
                at_rows, at_keys = [p[:2] for p in places], [(p[0], p[2]) for p in places]
                more, more_lse = run_piece(
                    self._lane_copy(self.q, head, at_rows, piece.rows),
                    self._lane_copy(self.k, head // self.group, at_keys, piece.keys),
                    self._lane_copy(self.v, head // self.group, at_keys, piece.keys),
                    mask,
                    scale,
                )
                if shift is not None:
                    more_lse = more_lse + shift
                if _evenly_spaced(at_rows) and _ascending(out, at_rows) and _ascending(lse, at_rows):
                    views = [self._lane_view(t, head, at_rows, piece.rows) for t in (out, lse)]
                    self._store(*views, more, more_lse, piece.fresh)
                    continue
                for index, place in enumerate(at_rows):
                    views = [self._lane_view(t, head, [place], piece.rows) for t in (out, lse)]
                    one = slice(index, index + 1)
                    self._store(*views, more[:, one], more_lse[:, one], piece.fresh)
        if not self.fused:  # a query all of whose scores are -inf: 0/0, as dense attention has it
            out.masked_fill_(torch.isneginf(lse)[..., None], math.nan)
        return out, lse

    def _lane_axes(self, tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or self.group == 1 else self._as_groups(tensor)

    @staticmethod
    def _store(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, fresh: bool) -> None:
        if fresh:
            out.copy_(more)
            lse.copy_(more_lse)
        else:
            engine.merge(out, lse, more, more_lse)

    def backward(self, out: Tensor, lse: Tensor, grad: Tensor, want_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
        groups, lanes = self._work()
        run_piece = engine.fused_backward if self.fused else engine.plain_backward
        scale = self.problem.scale
        out, grad = self._usable(out), self._usable(grad)
        if not want_bias and (direct := self._single_call(groups, lanes)):
            group, piece = direct
            mask = self._lane_axes(self._mask(piece, group.rows, group.heads))
            return run_piece(grad, self.q, self.k, self.v, out, lse, mask, scale)[:3]
        dq, dk, dv = (gradient_like(t, self.dtype).zero_() for t in (self.q, self.k, self.v))
        if want_bias:
            self._start_bias_gradients()
        for group, piece in groups:
            mask, shift = (self._lane_axes(f(piece, group.rows, group.heads)) for f in (self._mask, self._shift))
            own_lse = self._rows(lse, group, piece)
            gradients = run_piece(
                self._rows(grad, group, piece),
                self._rows(self.q, group, piece),
                self._keys(self.k, group, piece),
                self._keys(self.v, group, piece),
                self._rows(out, group, piece),
                own_lse if shift is None else own_lse - shift,
                mask,
                scale,
            )
            self._rows(dq, group, piece).add_(gradients.q)
            keys = slice(piece.key, piece.key + piece.keys)
            for total, part in ((dk, gradients.k), (dv, gradients.v)):
                if self.group == 1:
                    total[group.rows, group.heads, keys].add_(part)
                else:
                    first = group.heads.start // self.group
                    total[group.rows.start, first : first + part.shape[0], keys].add_(part.sum(1))
            if want_bias:
                assert gradients.scores is not None
                scores = gradients.scores if self.group == 1 else gradients.scores.flatten(0, 1)[None]
                self._add_bias_gradients(piece, group.rows, group.heads, scores)
        for (head, row, piece), all_places in lanes.items():
            rows, heads = slice(row, row + 1), slice(head, head + 1)
            mask, shift = self._mask(piece, rows, heads), self._shift(piece, rows, heads)
            for places in self._calls(piece, all_places):
                at_rows, at_keys = [p[:2] for p in places], [(p[0], p[2]) for p in places]
                own_lse = self._lane_copy(lse, head, at_rows, piece.rows)
                gradients = run_piece(
                    self._lane_copy(grad, head, at_rows, piece.rows),
                    self._lane_copy(self.q, head, at_rows, piece.rows),
                    self._lane_copy(self.k, head // self.group, at_keys, piece.keys),
                    self._lane_copy(self.v, head // self.group, at_keys, piece.keys),
                    self._lane_copy(out, head, at_rows, piece.rows),
                    own_lse if shift is None else own_lse - shift,
                    mask,
                    scale,
                )
                for index, (row_place, key_place) in enumerate(zip(at_rows, at_keys, strict=True)):
                    batch, start = row_place
                    dq[batch, head, start : start + piece.rows].add_(gradients.q[0, index])
                    keys = slice(key_place[1], key_place[1] + piece.keys)
                    dk[batch, head // self.group, keys].add_(gradients.k[0, index])
                    dv[batch, head // self.group, keys].add_(gradients.v[0, index])
                    if want_bias:
                        assert gradients.scores is not None
                        one = gradients.scores[:, index : index + 1]
                        self._add_bias_gradients(piece, slice(batch, batch + 1), heads, one)
        return dq, dk, dv

    # The gradient of the bias

    def _start_bias_gradients(self) -> None:
        if isinstance(self.problem.bias, LinearBias):
            self.dpast = self.q.new_zeros((self.batch, self.heads), dtype=torch.float64)
            self.dfuture = torch.zeros_like(self.dpast)
        elif isinstance(self.problem.bias, BucketBias):
            self.dtable = torch.zeros_like(self.problem.bias.table, dtype=torch.float64)

    def _add_bias_gradients(self, piece: Piece, rows: slice, heads: slice, scores: Tensor) -> None:
        """scores: gradients of the scores of a piece, [rows, heads, R, W]."""
        bias = self.problem.bias
        by_distance = engine.sums_by_distance(scores).double()  # [rows, heads, W + R - 1]
        first = piece.distance - piece.rows + 1
        distance = torch.arange(first, piece.distance + piece.keys, device=scores.device)
        if isinstance(bias, LinearBias):
            assert self.dpast is not None and self.dfuture is not None
            ahead = torch.where(distance > 0, bias.offset - distance, 0.0)
            self.dpast[rows, heads] += (by_distance * distance.clamp_max(0)).sum(-1)
            self.dfuture[rows, heads] += (by_distance * ahead).sum(-1)
        elif isinstance(bias, BucketBias):
            assert self.dtable is not None
            self.dtable[:, heads].index_add_(0, bias.bucket(distance), by_distance.sum(0).T)

    def bias_gradients(self) -> BiasGradients:
        bias = self.problem.bias
        if isinstance(bias, BucketBias) and self.dtable is not None:
            return BiasGradients(table=self.dtable.to(bias.table.dtype))
        if not isinstance(bias, LinearBias) or self.dpast is None or self.dfuture is None:
            return BiasGradients()

        def fold(gradient: Tensor, slopes: Tensor) -> Tensor:
            return (gradient if slopes.dim() == 2 else gradient.sum(0)).to(slopes.dtype)

        if bias.future is None:  # one slope for both sides
            return BiasGradients(past=fold(self.dpast + self.dfuture, bias.slopes))
        return BiasGradients(past=fold(self.dpast, bias.slopes), future=fold(self.dfuture, bias.future))


def _step(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(one, two, strict=True))


def _evenly_spaced(places: list) -> bool:
    """Whether places lie at constant steps in every coordinate."""
    steps = {_step(one, two) for one, two in zip(places[:-1], places[1:], strict=True)}
    return len(steps) < 2


def _ascending(tensor: Tensor, places: list[tuple[int, int]]) -> bool:
    """Whether memory offsets grow along places, as a strided view needs."""
    if len(places) < 2:
        return True
    step_row, step_start = places[1][0] - places[0][0], places[1][1] - places[0][1]
    return step_row * tensor.stride(0) + step_start * tensor.stride(2) > 0
