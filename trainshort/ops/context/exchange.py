"""What travels: for each row of the batch and key head, the keys of one rank that another needs, and their gradients.

Every rank knows the windows of all ranks, so reader and owner list the same keys in the same order and no index is
sent. A message holds the levels of these keys (under a DecayBias: running sums of gates for the query heads that
share the key head, or times), keys, and values; on the way back the gradients of the same things.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainshort.ops.context.plan import Places, Plan
from trainshort.ops.context.transport import from_bytes, to_bytes


def own_levels(plan: Plan) -> Tensor | None:
    """The levels of a span's own keys, float64 [B, Hkv, L, T]: L numbers for each, past gates before future ones."""
    batch, kv_heads = plan.problem.q.shape[0], plan.problem.k.shape[1]
    if plan.levels.since is not None:
        return plan.levels.since[:, None, None].expand(batch, kv_heads, 1, -1)
    sums = [gates.sums.detach().expand(batch, -1, -1).unflatten(1, (kv_heads, -1)) for gates in plan.levels.gates]
    return torch.cat(sums, dim=2) if sums else None


def level_offset(plan: Plan, rank: int) -> Tensor:
    """What is added to the levels of another rank's keys, so that they go on into this one's: [B, Hkv, L]."""
    levels, me = plan.levels, plan.spans.rank
    batch, kv_heads = plan.problem.q.shape[0], plan.problem.k.shape[1]
    if levels.time_bases is not None:
        since = levels.time_bases[rank] - levels.time_bases[me]
        return since[:, None, None].expand(batch, kv_heads, 1)
    sides = [sign * (base[rank] - base[me]) for sign, base in zip((-1.0, 1.0), levels.bases, strict=False)]
    return torch.cat([side.unflatten(1, (kv_heads, -1)) for side in sides], dim=2)


def message(levels: Tensor | None, k: Tensor, v: Tensor, places: Places) -> Tensor:
    """The bytes of these keys; levels [B, Hkv, L, T], k and v [B, Hkv, T, D]."""
    numbers = [] if levels is None else [levels.movedim(2, 3)[places]]
    return to_bytes([*numbers, k[places], v[places]])


def read_message(data: Tensor, count: int, width: int, like: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Levels [n, L] (width), keys and values [n, D] of a message of n keys."""
    shapes = [((count, like.shape[3]), like.dtype)] * 2
    if width:
        levels, k, v = from_bytes(data, [((count, width), torch.float64), *shapes])
        return levels, k, v
    k, v = from_bytes(data, shapes)
    return None, k, v


def message_size(count: int, width: int, like: Tensor) -> int:
    return count * (8 * width + 2 * like.shape[3] * like.element_size())
