"""Where the attention of one layer really goes: its softmax, row by row, summed up by distance.

This is the dense softmax, every score of it, so the time grows with the square of the length. Only some rows are
there at a time: memory grows with the length alone. All in float32, or float64 for a model that is float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.models.kept import Attended

AT_ONCE = {"cuda": 2**26}  # scores of some rows of all heads that are there at a time
AT_ONCE_ELSEWHERE = 2**22


class Rows(NamedTuple):
    """The softmax of some queries, as sums over keys: of those before a place, and of those from a place on."""

    positions: Tensor  # int64 [R], of the queries
    weights: Tensor  # [H, R, T]
    before: Tensor  # [H, R, T + 1]: the mass of the keys before each place
    after: Tensor | None  # [H, R, T + 1]: of those from each place on; None where no query sees the future

    def outside(self, first: Tensor, end: Tensor) -> Tensor:
        """The mass outside of the keys first <= j < end, int64 [H or 1, R] each."""
        shape = self.before.shape[:2]
        found = self.before.gather(-1, first.expand(shape)[..., None])[..., 0]
        if self.after is not None:
            found = found + self.after.gather(-1, end.expand(shape)[..., None])[..., 0]
        return found

    def beyond(self, distance: Tensor) -> Tensor:
        """The mass of keys more than `distance` away: int64 [H or 1, R or 1] -> [H, R]."""
        keys = self.before.shape[-1] - 1
        return self.outside((self.positions - distance).clamp(min=0), (self.positions + distance + 1).clamp(max=keys))

    def within(self, share: float) -> Tensor:
        """The smallest distance beyond which at most this share lies: int64 [H, R]."""
        low = torch.zeros(self.before.shape[:2], dtype=torch.int64, device=self.positions.device)
        high = torch.full_like(low, self.before.shape[-1] - 1)
        while bool((low < high).any()):
            middle = (low + high) // 2
            enough = self.beyond(middle) <= share
            low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
        return low

    def keys_at(self, distance: Tensor) -> Tensor:
        """Of the two keys that are so far away, the one with more weight: int64 [H, R] -> [H, R]."""
        keys = self.before.shape[-1] - 1
        places = torch.stack((self.positions - distance, self.positions + distance))
        there = (places >= 0) & (places < keys)
        weights = torch.stack(
            [self.weights.gather(-1, each.clamp(0, keys - 1)[..., None])[..., 0] for each in places]
        )
        past = weights.masked_fill(~there, -1.0).argmax(0) == 0
        return torch.where(past, places[0], places[1])


def rows_of(seen: Attended, *, causal: bool, scale: float) -> Iterator[Rows]:
    """The softmax of one text, some queries at a time. seen: with a batch of 1."""
    q, k, bias = seen.q[0], seen.k[0], seen.bias
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, length, _ = q.shape
    at_once = max(1, AT_ONCE.get(q.device.type, AT_ONCE_ELSEWHERE) // (heads * length))
    group = heads // k.shape[0]
    keys = k.to(dtype)[:, None].transpose(-1, -2)  # [Hkv, 1, D, T]
    places = torch.arange(length, device=q.device)
    sights = ("past",) * heads if causal else ("both",) * heads if bias is None else bias.sights(heads)
    both = any(sight != "past" for sight in sights)
    for start in range(0, length, at_once):
        here = places[start : start + at_once]
        place = places if both else places[: start + at_once]  # later keys are in nobody's sight
        scores = q[:, start : start + at_once].to(dtype).unflatten(0, (-1, group)) @ keys[..., : len(place)]
        scores = scores.flatten(0, 1) * scale  # [H, R, T]
        hidden = _out_of_sight(sights, here, place)
        if bias is not None:
            query, key = here[None, None, :, None], place[None, None, None]
            scores = scores + bias.between(query, key, dtype)[0]
            behind = bias.hides(query, key)
            hidden = hidden if behind is None else hidden | behind[0]
        weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
        yield Rows(here, weights, _sums(weights), _sums(weights.flip(-1)).flip(-1) if both else None)


def _out_of_sight(sights: tuple[str, ...], query: Tensor, key: Tensor) -> Tensor:
    """Where a head does not look: bool [H or 1, R, T]."""
    ahead = key[None] - query[:, None]
    hidden = {"past": ahead > 0, "future": ahead < 0, "both": torch.zeros_like(ahead, dtype=torch.bool)}
    if len(set(sights)) == 1:
        return hidden[sights[0]][None]
    return torch.stack([hidden[sight] for sight in sights])


def _sums(weights: Tensor) -> Tensor:
    """Running sums from the left, from 0 on: [..., T + 1]. The far end is added up first, where weights are small."""
    return torch.nn.functional.pad(weights.cumsum(-1), (1, 0))
