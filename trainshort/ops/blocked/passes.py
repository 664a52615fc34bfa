"""One pass over a problem, forward or backward: which kernel calls to make, and what to do with their results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from trainshort.ops import threads
from trainshort.ops.blocked import piece_kernels
from trainshort.ops.blocked.calls import BatchedCall, GatheredCall, Place, split_places
from trainshort.ops.blocked.cut import Piece, PieceSizes, Segment, cut, segments
from trainshort.ops.blocked.decay_pieces import DecayPieces
from trainshort.ops.blocked.piece_bias import PieceBias
from trainshort.ops.dropout import factors
from trainshort.ops.problem import BLOCK, Problem, gradient_like
from trainshort.ops.windows import visible_blocks

LARGEST_TILE = 3072  # keys of a bias tile, so that it stays in a core's cache
TILE_ROWS = 256  # torch's CPU kernel takes larger steps from 192 queries on,
STRIP_ROWS = 1024  # and its largest from 768 on
TOGETHER = 2**21  # elements of keys that the pieces of one call may hold
CACHED = 2**19  # elements of the queries that one thread takes at once
LARGEST_COPY = 2048  # keys: wider pieces are cheaper one by one than copied together


def bias_of(problem: Problem, pieces: list[Piece], dtype: torch.dtype) -> PieceBias | DecayPieces:
    """What the pieces of a problem add to their scores."""
    if problem.bias is None or problem.bias.by_distance:
        return PieceBias(problem, pieces, dtype)
    return DecayPieces(problem, dtype)


class Pass:
    """One pass over one problem: its tensors as the kernels need them, and the calls to make.

    lanes: rows and heads of the whole problem, of which this one may be a split.
    """

    def __init__(self, problem: Problem, windows: Tensor | None, fused: bool, lanes: torch.Size) -> None:
        self.fused, self.dtype = fused, problem.accumulate_dtype
        self.sums = False  # whether q, k and v have channels for sums of the scores' gradients
        self.q, self.k, self.v = (self._usable(t.detach()) for t in (problem.q, problem.k, problem.v))
        self.problem = replace(problem, q=self.q, k=self.k, v=self.v)
        self.batch, self.heads, self.queries, self.dim = self.q.shape
        self.group = self.heads // self.k.shape[1]
        self.beyond = problem.separable_beyond
        self.by_distance = problem.bias is None or problem.bias.by_distance
        self.sizes = self._sizes(*lanes)
        self.segments = segments(problem) if self.k.shape[2] and self.queries else []
        self.windows = windows
        whole = self._whole_heads()
        batched = list(self._batched_calls(whole))
        gathered = self._places(whole)
        every_piece = [call.piece for call in batched] + [piece for _, _, piece in gathered]
        self.bias = bias_of(self.problem, every_piece, self.dtype)
        self.calls: list[BatchedCall | GatheredCall] = [*batched, *self._gathered_calls(gathered)]
        self.calls.sort(key=lambda call: not call.piece.fresh)

    def _usable(self, tensor: Tensor) -> Tensor:
        """In the dtype of the arithmetic, rows contiguous and apart, as the kernels need them."""
        tensor = tensor.to(self.dtype)
        return tensor if piece_kernels.has_plain_rows(tensor) else tensor.contiguous()

    def _sizes(self, batch: int, heads: int) -> PieceSizes:
        """Pieces whose bias and scores never outgrow the inputs, or an eighth of a length x length matrix."""
        length = max(self.queries, self.k.shape[2], 1)
        if not self.fused:  # scores that a lane may hold
            budget = max(self.queries * self.dim, length * length // (8 * max(1, batch * heads)))
            rows = next((rows for rows in (BLOCK, 64, 32) if rows * rows <= budget), 16)
            keys = max(rows, budget // rows)
            return PieceSizes(rows, keys, rows, keys)
        budget = max(batch * self.queries * self.dim, length * length // 8)  # elements of the tile of a head
        rows = next((rows for rows in (TILE_ROWS, BLOCK, 64) if 2 * rows * rows <= budget), 32)
        if length <= BLOCK:
            rows = min(rows, BLOCK // 2)  # two steps of a short row follow its diagonal
        elif self.queries <= BLOCK:
            rows = min(rows, BLOCK)
        if rows > BLOCK and not math.isfinite(self.v.sum().item()):
            rows = BLOCK  # 0 * inf is not 0: keep what a query block does not visit out of its pieces
        keys = max(min(budget // rows - rows, LARGEST_TILE) // rows, 1) * rows
        if not self.by_distance:
            keys = rows  # tiles are made one by one: no larger than the bias must be a matrix
        return PieceSizes(rows, keys, max(rows, min(STRIP_ROWS, keys)), length)

    # Which calls

    def _whole_heads(self) -> list[bool]:
        """Which heads visit all that is in their sight, in every row of the batch."""
        if self.windows is None:
            return [True] * self.heads
        low, high = visible_blocks(self.problem, BLOCK)
        everything = torch.stack((low, high), dim=-1).masked_fill((high <= low)[..., None], 0)
        return (self.windows == everything).flatten(2).all(-1).all(0).tolist()

    def _batched_calls(self, whole: list[bool]) -> Iterator[BatchedCall]:
        """Heads that visit everything, as many at a time as a bias tile no larger than q allows."""
        sights = self.problem.sights
        width = min(self.sizes.tile_keys, self.k.shape[2]) + self.sizes.rows
        most = max(1, self.q.numel() // (self.sizes.rows * width * (1 if self.by_distance else max(1, self.batch))))
        head = 0
        while head < self.heads:
            end = head + 1
            if whole[head]:
                while end < self.heads and end - head < most and whole[end] and sights[end] == sights[head]:
                    end += 1
                if self.group > 1:  # whole groups, or single heads
                    end = end // self.group * self.group if head % self.group == 0 else head + 1
                    end = max(end, head + 1)
                for segment in self.segments:
                    pieces = cut(segment, sights[head], None, self.beyond, self.sizes)
                    for rows in self._rows_of(segment):
                        for piece in pieces:
                            yield BatchedCall(piece, rows, slice(head, end), self.group)
            head = end

    def _rows_of(self, segment: Segment) -> list[slice]:
        if segment.batch is not None:
            return [slice(segment.batch, segment.batch + 1)]
        if self.group > 1 or (self.by_distance and self.problem.bias_differs_by_row):
            return [slice(row, row + 1) for row in range(self.batch)]
        if not threads.is_inside():
            return [slice(0, self.batch)]
        # What one thread computes at once stays in its core's cache.
        rows = max(1, CACHED // (self.heads * self.queries * self.dim))
        return [slice(row, min(row + rows, self.batch)) for row in range(0, self.batch, rows)]

    def _places(self, whole: list[bool]) -> dict[tuple[int, int, Piece], list[Place]]:
        """Places of equal pieces: (head, row of the batch if its bias is its own, piece at 0) -> places."""
        gathered: dict[tuple[int, int, Piece], list[Place]] = defaultdict(list)
        if self.windows is None or all(whole):
            return gathered
        windows = self.windows.tolist()
        own_bias = self.by_distance and self.problem.bias_differs_by_row
        for row in range(self.batch):
            for head in range(self.heads):
                if whole[head]:
                    continue
                for segment in self.segments:
                    if segment.batch not in (None, row):
                        continue
                    sight = self.problem.sights[head]
                    for piece in cut(segment, sight, windows[row][head], self.beyond, self.sizes):
                        key = (head, row if own_bias else 0, piece._replace(row=0, key=0))
                        gathered[key].append((row, piece.row, piece.key))
        return gathered

    def _gathered_calls(self, gathered: dict[tuple[int, int, Piece], list[Place]]) -> Iterator[GatheredCall]:
        for (head, _, piece), every_place in gathered.items():
            elements = piece.keys * self.dim
            most = max(1, min(max(2, TOGETHER // elements), self.k.numel() // elements))
            if not self.fused or not self.by_distance:  # scores, or a bias for each place, are held in full
                most = max(1, min(most, self.q.numel() // (piece.rows * piece.keys)))
            for places in split_places(every_place, most, copy=piece.keys <= LARGEST_COPY):
                yield GatheredCall(piece, head, self.group, places)

    def _single_call(self) -> bool:
        """Whether one call computes the whole problem, so that its results can be taken as they are."""
        if len(self.calls) != 1 or self.group > 1:
            return False
        call = self.calls[0]
        whole = (self.batch * self.heads, self.queries, self.k.shape[2])
        return call.piece.kind == "tile" and (call.lanes, call.piece.rows, call.piece.keys) == whole

    def _written(self) -> int:
        """How many queries, of all heads, see some key."""
        return sum(call.piece.rows * call.lanes for call in self.calls if call.piece.fresh)

    def _inputs(self, call: BatchedCall | GatheredCall) -> tuple[piece_kernels.Inputs, Tensor | None]:
        """What the kernels compute a call from, and what to add to its log-sum-exp."""
        triangle = self._is_fused(call) and call.piece.is_triangle(self.problem.sights[call.heads.start])
        causal = triangle and piece_kernels.can_hide_future(self.problem.scale)
        keys, values, hidden = call.keys(self.k), call.keys(self.v), self.bias.hidden(call)
        if hidden is not None:  # what no query of the piece sees must not even be multiplied by zero
            unseen = hidden.all(-2)[..., None]
            keys, values = keys.masked_fill(unseen, 0.0), values.masked_fill(unseen, 0.0)
        inputs = piece_kernels.Inputs(
            call.queries(self.q),
            keys,
            values,
            self.bias.mask(call, causal),
            self.problem.scale,
            causal,
            self._factors(call),
        )
        return inputs, self.bias.shift(call)

    def _factors(self, call: BatchedCall | GatheredCall) -> Tensor | None:
        """What dropout multiplies the weights of a piece by."""
        if self.problem.seed is None:
            return None
        index = torch.arange(self.k.shape[2], device=self.k.device).expand(self.batch, self.heads, -1)
        return factors(call.queries(self.problem.seed), call.of_keys(index), self.problem.dropout, self.dtype)

    def _is_fused(self, call: BatchedCall | GatheredCall) -> bool:
        return self.fused and not self.bias.straddles(call) and (not self.sums or self.bias.is_one_sided(call))

    def _forward(self, call: BatchedCall | GatheredCall) -> Callable[..., tuple[Tensor, Tensor]]:
        return piece_kernels.fused_forward if self._is_fused(call) else piece_kernels.plain_forward

    def _backward(self, call: BatchedCall | GatheredCall) -> Callable[..., piece_kernels.Gradients]:
        if not self.sums:
            return piece_kernels.fused_backward if self._is_fused(call) else piece_kernels.plain_backward
        compute = piece_kernels.fused_backward_with_sums if self._is_fused(call) else piece_kernels.plain_backward_of
        return partial(compute, dim=self.dim)

    # The passes

    def forward(self, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, in the dtype of the arithmetic, or written to the tensors given."""
        if into is None and self._single_call():
            return self._forward(self.calls[0])(self._inputs(self.calls[0])[0])
        if into is None or into[0].dtype != self.dtype:
            out = torch.empty_like(self.q)
            lse = torch.empty(self.q.shape[:3], dtype=self.dtype, device=self.q.device)
        else:
            out, lse = into
        if self._written() < lse.numel():  # queries that see no key
            out.zero_()
            lse.zero_()
        for call in self.calls:
            inputs, shift = self._inputs(call)
            part, part_lse = self._forward(call)(inputs)
            if shift is not None:
                part_lse = part_lse + shift
            for (target, lanes), (target_lse, _) in zip(
                call.query_targets(out), call.query_targets(lse), strict=True
            ):
                if call.piece.fresh:
                    target.copy_(part[:, lanes])
                    target_lse.copy_(part_lse[:, lanes])
                else:
                    piece_kernels.merge(target, target_lse, part[:, lanes], part_lse[:, lanes])
        if not self.fused:  # a query all of whose scores are -inf: 0/0, as dense attention has it
            out.masked_fill_(torch.isneginf(lse)[..., None], math.nan)
        if into is not None and out is not into[0]:
            into[0].copy_(out)
            into[1].copy_(lse)
        return out, lse

    def backward(
        self,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        want_bias: bool,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, in the dtype of the arithmetic, or written to the tensors given."""
        out, grad = self._usable(out), self._usable(grad)
        targets = (self.q, self.k, self.v)
        if want_bias and self.fused:
            self.sums = True
            self.q, self.k, self.v, out, grad = piece_kernels.with_sum_channels(self.q, self.k, self.v, out, grad)
        if into is None and self._single_call() and not want_bias:
            return self._backward(self.calls[0])(self._inputs(self.calls[0])[0], grad, out, lse)[:3]
        dq, dk, dv = into or (gradient_like(t, self.dtype) for t in targets)
        # Queries of one piece only are stored, not added; so are keys, by the calls that cover all of them once.
        store_queries = self._written() == lse.numel() and all(call.piece.fresh for call in self.calls)
        covering = self._covering_calls()
        if not store_queries:
            dq.zero_()
        if not covering:
            dk.zero_()
            dv.zero_()
        for call in sorted(self.calls, key=lambda call: -call.piece.keys):
            inputs, shift = self._inputs(call)
            own_lse = call.queries(lse)
            own_lse = own_lse if shift is None else own_lse - shift
            gradients = self._backward(call)(inputs, call.queries(grad), call.queries(out), own_lse)
            for target, lanes in call.query_targets(dq):
                _put(target, gradients.q[:, lanes], store_queries)
            for total, parts in ((dk, gradients.k), (dv, gradients.v)):
                for target, part in call.key_targets(total, parts):
                    _put(target, part, call in covering)
            if want_bias:
                self.bias.add_gradients(call, gradients)
        return dq, dk, dv

    def _covering_calls(self) -> list[BatchedCall]:
        """The calls over all keys, if every head of every row is in exactly one of them."""
        calls = [call for call in self.calls if isinstance(call, BatchedCall) and call.piece.keys == self.k.shape[2]]
        if self.group > 1 or sum(call.lanes for call in calls) != self.batch * self.heads:
            return []
        covered = torch.zeros((self.batch, self.heads), dtype=torch.bool, device="cpu")
        for call in calls:
            covered[call.rows, call.heads] = True
        return calls if bool(covered.all()) else []


def _put(target: Tensor, part: Tensor, store: bool) -> None:
    """Store a part of a gradient, or add it to what is there."""
    if store:
        target.copy_(part)
    else:
        target.add_(part)
