"""A model inside `ts.context_parallel`: each rank has a span of every text, and its layers must know where it stands.

Outside of it, functions here say so with None and cost nothing: compilers see that much. What ranks tell one another
is hidden from compilers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainshort.ops.context import state


@dataclass(frozen=True)
class Span:
    """Where the tokens of this rank stand in their texts."""

    start: int
    total: int  # tokens of all ranks
    first: Tensor | None  # with padding, the first real token of each row: int64 [B]


def own_span(tokens: Tensor, mask: Tensor | None) -> Span | None:
    """tokens [B, T], mask bool [B, T]: of this rank. All ranks must ask."""
    return None if state.current is None else _own_span(tokens, mask)


@torch.compiler.disable
def _own_span(tokens: Tensor, mask: Tensor | None) -> Span:
    parallel = state.current
    assert parallel is not None
    batch, length = tokens.shape
    sizes = torch.tensor([batch, mask is not None, length], device=tokens.device)
    gathered = parallel.gather(sizes).cpu()  # [ranks, 3]
    _refuse_other_rows(gathered[:, :2].tolist())
    lengths = gathered[:, 2]
    starts, total = lengths.cumsum(0) - lengths, int(lengths.sum())
    first = None
    if mask is not None:
        own = torch.full((batch,), total, device=tokens.device)
        if length:
            place = int(starts[parallel.rank]) + mask.to(torch.int8).argmax(-1)
            own = torch.where(mask.any(-1), place, total)
        first = parallel.gather(own).amin(0)
    return Span(int(starts[parallel.rank]), total, first)


def _refuse_other_rows(of_ranks: list[list[int]]) -> None:
    for rank, (batch, masked) in enumerate(of_ranks):
        if [batch, masked] != of_ranks[0]:
            raise ValueError(
                "all ranks of a context must have spans of the same texts: rank 0 has "
                f"{_rows(*of_ranks[0])}, rank {rank} has {_rows(batch, masked)}"
            )


def _rows(batch: int, masked: int) -> str:
    return f"{batch} rows with{'' if masked else 'out'} a key_padding_mask"


def last_of_rank_before(tensor: Tensor) -> Tensor | None:
    """Of a tensor [B, heads, T, width] the last token of the span before this one: [B, heads, 1, width], zeros where
    there is none. None outside of a context."""
    return None if state.current is None else _last_of_rank_before(tensor)


@torch.compiler.disable
def _last_of_rank_before(tensor: Tensor) -> Tensor:
    found: Tensor = _FromRankBefore.apply(tensor)
    return found


class _FromRankBefore(torch.autograd.Function):
    """Spans may be empty, so the rank before is the nearest one with tokens, and several may read the same token."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.parallel, ctx.shape = state.current, tensor.shape
        size = torch.tensor([tensor.shape[2]], device=tensor.device)
        lengths = ctx.parallel.gather(size)[:, 0].tolist()
        last = tensor[:, :, -1:] if tensor.shape[2] else tensor.new_zeros((*tensor.shape[:2], 1, tensor.shape[3]))
        everyone = ctx.parallel.gather(last)
        # For every rank the one it reads from, or -1.
        ctx.sources = [max((r for r in range(rank) if lengths[r]), default=-1) for rank in range(len(lengths))]
        source = ctx.sources[ctx.parallel.rank]
        return everyone[source].clone() if source >= 0 else torch.zeros_like(last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        everyone = ctx.parallel.gather(grad)
        total = grad.new_zeros(ctx.shape)
        for reader, source in enumerate(ctx.sources):
            if source == ctx.parallel.rank:
                total[:, :, -1:] += everyone[reader]
        return total


@torch.compiler.disable
def over_ranks(total: Tensor, count: Tensor, mean: bool) -> Tensor:
    """A sum of losses on this rank, and how many they are -> their mean or sum over all ranks.

    Every rank gets the same number. Its gradient is that of the rank's own losses: gradients are to be summed over
    ranks, as one process would.
    """
    assert state.current is not None
    own = torch.stack((total.detach().double(), count.double()))
    everything, number = state.current.gather(own).sum(0)
    share = number if mean else torch.ones_like(number)
    mine = total / share.to(total.dtype)
    return mine + ((everything / share).to(total.dtype) - mine).detach()
