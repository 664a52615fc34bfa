"""What travels: for each row of the batch and key head, the keys of one rank that another needs, and their gradients.

Every rank knows the windows of all ranks, so reader and owner list the same keys in the same order and no index is
sent. A message holds the levels of these keys (under a DecayBias: running sums of gates for the query heads that
share the key head, or times) and keys and values side by side; on the way back the gradients of the same things.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops.context.plan import Plan
from trainshort.ops.context.transport import from_bytes, to_bytes


class Places(NamedTuple):
    """Keys of one rank that another needs: row of the batch, key head, and place in the owner's span; int64 [n]."""

    rows: Tensor
    heads: Tensor
    keys: Tensor

    @property
    def size(self) -> int:
        return self.rows.shape[0]


def places_of(plan: Plan, owner: int, reader: int) -> Places:
    """The keys of `owner` that `reader` needs."""
    device, kv_heads = plan.problem.q.device, plan.problem.k.shape[1]
    start = plan.spans.starts[owner]
    first = (plan.windows[reader, ..., 0] - start).clamp_min(0).flatten()  # [B * Hkv]
    end = (plan.windows[reader, ..., 1] - start).clamp_max(plan.spans.lengths[owner]).flatten()
    count = (end - first).clamp_min(0)
    total = int(count.sum())
    before = (count.cumsum(0) - count).to(device)
    lane = torch.arange(len(count), device=device).repeat_interleave(count.to(device), output_size=total)
    keys = torch.arange(total, device=device) - before[lane] + first.to(device)[lane]
    return Places(lane // kv_heads, lane % kv_heads, keys)


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
    index = (places.rows, places.heads, places.keys)
    both = torch.cat((k[index], v[index]), dim=-1)
    if levels is None:
        return to_bytes([both])
    return to_bytes([levels.movedim(2, 3)[index], both])


def read_message(data: Tensor, count: int, width: int, like: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Levels [n, L] (width), keys and values [n, D] of a message of n keys."""
    shapes = [((count, 2 * like.shape[3]), like.dtype)]
    if width:
        levels, both = from_bytes(data, [((count, width), torch.float64), *shapes])
    else:
        levels, both = None, from_bytes(data, shapes)[0]
    k, v = both.chunk(2, dim=-1)
    return levels, k, v


def message_size(count: int, width: int, like: Tensor) -> int:
    return count * (8 * width + 2 * like.shape[3] * like.element_size())
