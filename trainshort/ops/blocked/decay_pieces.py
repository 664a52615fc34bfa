"""The bias of pieces under a DecayBias, and the gradient of its sums.

c_i - c_j differs from place to place, so each piece has a bias of its own. Around the diagonal it is a matrix, whose
differences are taken in float64 and rounded once. To the side it is one row: c_a - c_j, where a is the key of the
piece that is nearest to the queries, and each query adds c_i - c_a to its log-sum-exp. Both are at most zero there,
and an error of a large number only meets a weight that is as small.

Borders that nothing crosses are -inf in the bias of pieces that hold keys from both sides of one. A query may then
see no key of a piece, which the fused kernel can't say: such pieces are computed by the plain ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainshort.ops.blocked.calls import BatchedCall, GatheredCall
from trainshort.ops.blocked.piece_kernels import Gradients
from trainshort.ops.decay import DecayBias, pick
from trainshort.ops.problem import Problem

Call = BatchedCall | GatheredCall


class DecayPieces:
    """The bias of every piece that will be computed: see PieceBias."""

    def __init__(self, problem: Problem, dtype: torch.dtype) -> None:
        assert isinstance(problem.bias, DecayBias)
        self.bias, self.dtype = problem.bias, dtype
        self.batch, self.heads = problem.q.shape[:2]
        self.causal = problem.causal
        self._place = problem.bias_positions()[:, None]  # [B or 1, 1, Tq]
        self._levels = [self._by_row(levels) for levels in self.bias.levels()]  # c for earlier and later keys
        self._at_queries = [self._by_row(pick(levels, self._place)) for levels in self.bias.levels()]
        key = torch.arange(problem.k.shape[2], device=problem.q.device)
        self._key = self._by_row(key.expand(1, self.heads, -1))
        self._first, self._end = (self._border(border) for border in (self.bias.gate_first, self.bias.ahead_end))
        self._wide = self._levels[0].dtype  # for long sums
        self.sums: dict[str, Tensor] = {}  # of gradients

    def _by_row(self, tensor: Tensor) -> Tensor:
        return tensor.expand(self.batch, -1, -1)

    def _border(self, border: Tensor | None) -> Tensor | None:
        """First or one-past-last key that each query may see, [B, H, Tq]; None where that is no limit."""
        if border is None or border.numel() == 0:
            return None
        limit = 0 if border is self.bias.gate_first else border.shape[2]
        return self._by_row(pick(border, self._place)) if bool((border != limit).any()) else None

    def straddles(self, call: Call) -> bool:
        """Whether some query may not see all keys of the piece, for a border between them."""
        if self._first is None and self._end is None:
            return False
        key = call.of_keys(self._key)
        early = self._first is not None and bool((call.queries(self._first).amax(-1) > key[..., 0]).any())
        return early or (self._end is not None and bool((call.queries(self._end).amin(-1) <= key[..., -1]).any()))

    def is_one_sided(self, call: Call) -> bool:
        """Whether all keys of a piece are earlier, or all later ones, so that sums of gradients are enough."""
        return self.causal or call.piece.kind != "tile"

    def hidden(self, call: Call) -> Tensor | None:
        """Which keys of a piece a border hides from its queries: bool [X, Y, R, W]; None for none."""
        if not self.straddles(call):
            return None
        key = call.of_keys(self._key)[:, :, None]
        hidden = torch.zeros((), dtype=torch.bool, device=key.device)
        if self._first is not None:
            hidden = hidden | (key < call.queries(self._first)[..., None])
        if self._end is not None:
            hidden = hidden | (key >= call.queries(self._end)[..., None])
        return hidden

    def mask(self, call: Call, causal: bool) -> Tensor | None:
        """What to add to the scores of a piece: [X, Y, R or 1, W]. causal: the kernel hides the future by itself."""
        piece = call.piece
        if piece.kind == "tile":
            bias = self._differences(call)
            if self.causal and not causal:
                bias = bias.masked_fill_(self._distance(call) > 0, -math.inf)
            if piece.hidden_left or piece.hidden_right:
                bias[:, :, piece.half :, : piece.hidden_left] = -math.inf
                bias[:, :, : piece.half, piece.keys - piece.hidden_right :] = -math.inf
        else:
            ahead = _is_ahead(call)
            level = call.of_keys(self._levels[ahead])
            row = level - level[..., :1] if ahead else level[..., -1:] - level
            bias = row.to(self.dtype)[:, :, None]
        hidden = self.hidden(call)
        return bias if hidden is None else bias.masked_fill(hidden, -math.inf)

    def shift(self, call: Call) -> Tensor | None:
        """On a side: what each query adds to the bias of its nearest key, [X, Y, R]."""
        if call.piece.kind == "tile":
            return None
        ahead = _is_ahead(call)
        query, level = call.queries(self._at_queries[ahead]), call.of_keys(self._levels[ahead])
        return (level[..., :1] - query if ahead else query - level[..., -1:]).to(self.dtype)

    def _differences(self, call: Call) -> Tensor:
        """The bias of all pairs of a piece, those out of sight too: [X, Y, R, W]."""
        ahead = _is_ahead(call)
        query, level = call.queries(self._at_queries[ahead]), call.of_keys(self._levels[ahead])
        past = torch.empty((*query.shape, level.shape[-1]), dtype=self.dtype, device=query.device)
        if ahead:
            return torch.sub(level[:, :, None], query[..., None], out=past)
        torch.sub(query[..., None], level[:, :, None], out=past)
        if self.causal or call.piece.kind != "tile":
            return past
        query, level = call.queries(self._at_queries[1]), call.of_keys(self._levels[1])
        return torch.where(self._distance(call) > 0, (level[:, :, None] - query[..., None]).to(self.dtype), past)

    def _distance(self, call: Call) -> Tensor:
        """Key position - query position, [R, W]."""
        piece = call.piece
        row = torch.arange(piece.rows, device=self._key.device)[:, None]
        return torch.arange(piece.distance, piece.distance + piece.keys, device=self._key.device) - row

    def add_gradients(self, call: Call, gradients: Gradients) -> None:
        """Take in the gradients of a piece's scores, [X, Y, R, W], or their sums over keys and over queries."""
        if self.bias.rates is not None:
            assert gradients.scores is not None
            terms = (gradients.scores * self._differences(call)).sum((-2, -1), dtype=self._wide)
            for rows, heads, part in call.by_head(terms):
                self._sums_of("rates")[rows, heads] += part
        elif gradients.scores is None:
            self._add(call, _is_ahead(call), gradients.rows, gradients.columns)
        elif call.piece.kind != "tile" or self.causal:
            self._add(call, _is_ahead(call), *self._both_sums(gradients.scores))
        else:
            later = self._distance(call) > 0
            self._add(call, False, *self._both_sums(gradients.scores.masked_fill(later, 0.0)))
            self._add(call, True, *self._both_sums(gradients.scores.masked_fill(~later, 0.0)))

    def _both_sums(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores.sum(-1, dtype=self._wide), scores.sum(-2, dtype=self._wide)

    def _add(self, call: Call, ahead: bool, rows: Tensor | None, columns: Tensor | None) -> None:
        assert rows is not None
        assert columns is not None
        side = "ahead" if ahead else "gate"
        for target, lanes in call.query_targets(self._sums_of(f"{side}_rows")):
            target += rows[:, lanes]
        for target, part in call.head_targets(self._sums_of(f"{side}_columns"), columns):
            target += part

    def _sums_of(self, name: str) -> Tensor:
        if name not in self.sums:
            size = {"rates": (), "rows": self._place.shape[2:]}.get(name.split("_")[-1], self._key.shape[2:])
            shape = (self.batch, self.heads, *size)
            self.sums[name] = torch.zeros(shape, dtype=self._wide, device=self._key.device)
        return self.sums[name]

    def take(self, sums: dict[str, Tensor], rows: slice, heads: slice) -> None:
        """Take in the sums of another one, for these rows of the batch and these heads."""
        for name, found in sums.items():
            self._sums_of(name)[rows, heads] += found

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the learned fields of the bias: dc = row sums of the scores' gradients - column sums."""
        if self.bias.rates is not None:
            return self.bias.gradients({"rates": self._sums_of("rates")})
        place = self._by_row(self._place.expand(-1, self.heads, -1)).clamp(min=0)
        found = {}
        for side, sign in (("gate", 1.0), ("ahead", -1.0)):
            if getattr(self.bias, f"{side}_sums") is not None:
                columns = self._sums_of(f"{side}_columns")
                if columns.shape[2]:
                    columns = columns.scatter_add(2, place, -self._sums_of(f"{side}_rows"))
                found[f"{side}_sums"] = -sign * columns
        return self.bias.gradients(found)


def _is_ahead(call: Call) -> bool:
    """Whether the keys of a piece to the side lie in the future."""
    return call.piece.kind != "tile" and call.piece.distance > 0
