"""Inputs for which the bounds of the kernels are as tight as they can be: what is skipped comes within a step of the
tolerance, so that a bound which forgets a term skips too much.

All vectors lie on one line, so that Cauchy-Schwarz is an equality. One query per head is loud, all others are zero
and see distance alone. Its own key attracts it a little less than the longest keys can, those near it repel it, and
all keys beyond attract it as much as their norm allows. How much less is chosen such that the window must end just
before a unit of keys that holds a hair more than may be skipped.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from tests.ops.dense import Case

UNIT = 64
SLACK = 0.012  # nats that the kernels spare, beyond what the proof needs
NORM = 30.0


def line(values: Tensor, dim: int = 16) -> Tensor:
    """[...] -> [..., dim]: vectors of these lengths along one direction."""
    direction = torch.zeros(dim)
    direction[3] = 1.0
    return values[..., None] * direction


def tail(slope: float) -> float:
    return -math.log(-math.expm1(-slope))


def tight_case(
    *,
    slopes: list[float],
    tolerance: float,
    share: float,
    length: int = 513,
    ahead: bool = False,
    offset: float = 0.0,
) -> Case:
    """share: the part of the tolerance that may be skipped on the side in question. ahead: the side of the future.
    The loud query is the only one of its tile, so that no other keeps the window wide."""
    heads = len(slopes)
    loud = length - 1
    q, k = torch.zeros(heads, length), torch.full((heads, length), NORM)
    q[:, loud] = 1.0
    for head, slope in enumerate(slopes):
        needs = tail(slope) + math.log(1.0 / (tolerance * share))
        # The first unit edge for which the own key falls half a nat short of the longest.
        edge = int(loud - (needs + 0.5 + SLACK) / slope - 2) // UNIT * UNIT
        steps = loud - edge + 1.05 + SLACK / slope - (offset if ahead else 0.0)
        k[head, edge:] = -NORM
        k[head, loud] = NORM - (slope * steps - needs - SLACK)
        assert edge >= 64, "length and slope don't fit"
        # Older keys weigh nothing: every second of them repels, so that the mean of all keys is small.
        spare = max(0, edge - int(8.0 / slope))
        k[head, : min(spare, 2 * edge - length) : 2] = -NORM
    q, k = line(q)[None], line(k)[None]
    if ahead:
        q, k = q.flip(2)[:, :, :1], k.flip(2)
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(0))
    return Case(
        q=q,
        k=k,
        v=v,
        query_start=0 if ahead else None,
        slopes=torch.tensor(slopes),
        scale=1.0,
        tolerance=tolerance,
        causal=not ahead,
        offset=offset,
    )


def longer_than_the_sample(length: int = 512) -> Case:
    """One query longer than any that a sample meets, and one long key among zeros that it wants."""
    q, k = torch.zeros(2, length), torch.zeros(2, length)
    q[:, -1] = 10.0
    q[:, :-1] = 0.01
    k[:, 70] = 4.0
    slopes = torch.tensor([30.0, 20.0]) / length
    return Case(q=line(q)[None], k=line(k)[None], v=torch.randn(1, 2, length, 16), slopes=slopes, scale=1.0)


def thinly_spread(tolerance: float, side_share: float, length: int = 1024, ahead: bool = False) -> Case:
    """Scores that undo the slope, so that every far tile holds the same mass, too little to matter by itself."""
    slope, near = 0.05, 128
    each = 0.35 * tolerance * side_share  # of a tile of 64 keys
    total = 1.0 / -math.expm1(-slope)
    place = torch.arange(length).float()
    level = math.log(each * total / UNIT) + slope * (length - 1)
    k = torch.where(place < length - near, level - slope * place, 0.0)
    q = torch.zeros(length)
    q[-1] = 1.0
    q, k = line(q)[None, None], line(k)[None, None]
    if ahead:
        q, k = q.flip(2), k.flip(2)
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(0))
    return Case(q=q, k=k, v=v, slopes=torch.tensor([slope]), scale=1.0, tolerance=tolerance, causal=not ahead)


def decoding_case(slope: float, tolerance: float, keys: int = 900) -> Case:
    """One query behind a cache with norms: the own key attracts, those before it repel, all older ones attract."""
    k = torch.full((keys,), NORM)
    needs = tail(slope) + math.log(1.0 / tolerance)
    edge = int(keys - 1 - (needs + 0.5) / slope - 2) // UNIT * UNIT
    assert edge > 0
    k[edge:] = -NORM
    steps = keys - 1 - edge + 1.05 + 0.01 / slope
    k[-1] = NORM - (slope * steps - needs - 0.01)
    q = line(torch.ones(1, 1, 1))
    v = torch.zeros(1, 1, keys, 16)
    v[:, :, :edge] = 1.0  # the output is the mass of the keys before the edge
    norms = torch.full((1, 1), NORM)
    return Case(
        q=q, k=line(k)[None, None], v=v, slopes=torch.tensor([slope]), scale=1.0, tolerance=tolerance, key_norms=norms
    )


def shifted(case: Case, size: float = 25.0) -> Case:
    """The same weights with keys that share a large part."""
    return replace(case, k=case.k + line(torch.tensor(size)))


def outlier_case(
    slope: float = 0.03, tolerance: float = 2.0**-6, length: int = 577, edge: int = 320, boost: float = 0.0
) -> Case:
    """Far keys that grow into the past at half the rate of the slope, so that each unit counts for the sum over
    units: together those before `edge` hold a twentieth more than the forward pass may skip. The loud query is the
    only one of its tile: beside outliers, the bound takes the worst of a tile's queries together.

    boost: in steps from unit to unit, how much more all units but the last before `edge` hold. The last one alone
    could be skipped then.
    """
    step = slope * UNIT / 2
    back = edge // UNIT - 1 - torch.arange(length) // UNIT  # units from the last before the edge
    norm = 12.0 + step * (back + boost * (back > 0))
    k = torch.where(back >= 0, norm, -12.0)
    q = torch.zeros(length)
    q[-1] = 1.0
    weight = k.double() - slope * (length - 1 - torch.arange(length).double())
    needs = math.log(1.0 / (0.5 * tolerance))
    if boost:
        k[-1] = float(torch.logsumexp(weight[back == 0], dim=0)) + needs + tail(step) + 0.02
    else:
        k[-1] = float(torch.logsumexp(weight[back >= 0], dim=0)) + needs - 0.05
    v = torch.randn((1, 1, length, 16), generator=torch.Generator().manual_seed(0))
    return Case(
        q=line(q)[None, None],
        k=line(k)[None, None],
        v=v,
        slopes=torch.tensor([slope]),
        scale=1.0,
        tolerance=tolerance,
    )
