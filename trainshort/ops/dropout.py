"""Attention dropout: which weights are dropped, as a hash of the seed and of four indices.

Whether the weight of a query on a key is dropped depends on the seed, on the row of the batch, on the head, and on
the indices of the query in q and of the key in k, and on nothing else: not on the backend, the device, tiles or
threads, nor on how many processes share a sequence, where the indices are those in the whole of it. So the backward
pass finds the same weights again without having stored anything.

Each query gets two numbers of 32 bits, which seed, row, head and its index are mixed into one after the other; each
of its keys mixes its own index with both. The mixing is a finalizer of two multiplications (Chris Wellons' lowbias32,
published without copyright). The kernels do the same in ops/triton/tiles.py; a test compares them bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

ONE = 2**31  # a probability of one
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
STARTS = (0x9E3779B9, 0x85EBCA6B)  # so that neither number of a query starts at zero
LOW = 0xFFFFFFFF
SEEDS = 2**63


def threshold_of(dropout: float) -> int:
    """The probability in units of 2^-31. Less than half a unit is no dropout at all; one unit at least is kept."""
    return min(round(dropout * ONE), ONE - 1)


def factor_of(dropout: float) -> float:
    """What weights that are not dropped are multiplied by: 1/(1 - p), with p as it was rounded."""
    return ONE / (ONE - threshold_of(dropout))


def seed_tensor(seed: int | Tensor | None, like: Tensor) -> Tensor:
    """A seed as int64 []: on a device nothing waits for. None: drawn from torch's generator of that device."""
    if seed is None:
        return torch.randint(SEEDS - 1, (), dtype=torch.int64, device=like.device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != like.device:
            raise ValueError(
                f"seed must be an int or one int64 on q's device {like.device}, got {seed.dtype} "
                f"{list(seed.shape)} on {seed.device}"
            )
        return seed.reshape(())
    if isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        raise TypeError(f"seed must be an int, an int64 tensor or None, got {type(seed).__name__}")
    if not -SEEDS <= seed < SEEDS:
        raise ValueError(f"seed must fit into 64 bits, got {seed}")
    return torch.full((), seed, dtype=torch.int64, device=like.device)


def head_seeds(seed: Tensor, batch: int, heads: int, first_query: int = 0, first_key: int = 0) -> Tensor:
    """The seed of a part of a longer sequence: int64 [B, H, 3].

    What each head of each row makes of the seed, two numbers of 32 bits in one, and the indices that the first query
    and the first key of the part have in the sequence.
    """
    first = _mixed((seed & LOW) ^ STARTS[0])
    numbers = torch.stack((first, _mixed(((seed >> 32) & LOW) ^ STARTS[1] ^ first)))
    for size, shape in ((batch, (-1, 1, 1)), (heads, (-1, 1))):
        numbers = _mixed(numbers ^ torch.arange(size, device=seed.device).view(shape))
    both = numbers[..., 0] | (numbers[..., 1] << 32)
    return torch.stack((both, torch.full_like(both, first_query), torch.full_like(both, first_key)), -1)


def query_seeds(seed: Tensor, batch: int, heads: int, queries: int) -> Tensor:
    """Of a seed [] or [B, H, 3]: for each query its two numbers and the index of the first key, [B, H, Tq, 3]."""
    if seed.dim() == 0:
        seed = head_seeds(seed, batch, heads)
    both, first_query, first_key = (own[..., None] for own in seed.unbind(-1))
    index = first_query + torch.arange(queries, device=seed.device)
    numbers = (_mixed((both & LOW) ^ index), _mixed(((both >> 32) & LOW) ^ index))
    return torch.stack((*numbers, first_key.expand_as(index)), -1)


def factors(seeds: Tensor, index: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """What weights are multiplied by, [..., Tq, Tk]: of queries with these seeds [..., Tq, 3] on keys with these
    indices [..., Tk] in k."""
    x = (index[..., None, :] + seeds[..., :1, 2:]) ^ seeds[..., :1]
    x = ((x ^ (x >> 16)) * MULTIPLIERS[0]) & LOW
    x = x ^ (x >> 15) ^ seeds[..., 1:2]
    x = (x * (MULTIPLIERS[1] - 2**32)) & LOW
    x = (x ^ (x >> 16)) >> 1
    return (x >= threshold_of(dropout)).to(dtype) * factor_of(dropout)


def _mixed(x: Tensor) -> Tensor:
    """A permutation of the numbers of 32 bits, held in int64."""
    x = ((x ^ (x >> 16)) * MULTIPLIERS[0]) & LOW
    x = ((x ^ (x >> 15)) * (MULTIPLIERS[1] - 2**32)) & LOW  # the same 32 bits, without passing 2^63
    return x ^ (x >> 16)
