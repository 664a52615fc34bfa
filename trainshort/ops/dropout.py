"""Attention dropout: which weights are dropped, as a hash of the seed and of four indices.

Whether the weight of a query on a key is dropped depends on the seed, on the row of the batch, on the head, and on
the indices of the query in q and of the key in k, and on nothing else: not on the backend, the device, tiles or
threads. So the backward pass finds the same weights again without having stored anything.

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
    """The probability in units of 2^-31. Less than half a unit is no dropout at all."""
    return round(dropout * ONE)


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


def query_keys(seed: Tensor, batch: int, heads: int, queries: int) -> Tensor:
    """Two numbers of 32 bits for each query: int64 [B, H, Tq, 2]."""
    first = _mixed((seed & LOW) ^ STARTS[0])
    keys = torch.stack((first, _mixed(((seed >> 32) & LOW) ^ STARTS[1] ^ first)))
    for size, shape in ((batch, (-1, 1, 1, 1)), (heads, (-1, 1, 1)), (queries, (-1, 1))):
        keys = _mixed(keys ^ torch.arange(size, device=seed.device).view(shape))
    return keys


def factors(keys: Tensor, index: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """What weights are multiplied by, [..., Tq, Tk]: of queries [..., Tq, 2] on keys with these indices [..., Tk]."""
    x = index[..., None, :] ^ keys[..., :1]
    x = ((x ^ (x >> 16)) * MULTIPLIERS[0]) & LOW
    x = x ^ (x >> 15) ^ keys[..., 1:]
    x = (x * (MULTIPLIERS[1] - 2**32)) & LOW
    x = (x ^ (x >> 16)) >> 1
    return (x >= threshold_of(dropout)).to(dtype) * factor_of(dropout)


def _mixed(x: Tensor) -> Tensor:
    """A permutation of the numbers of 32 bits, held in int64."""
    x = ((x ^ (x >> 16)) * MULTIPLIERS[0]) & LOW
    x = ((x ^ (x >> 15)) * (MULTIPLIERS[1] - 2**32)) & LOW  # the same 32 bits, without passing 2^63
    return x ^ (x >> 16)
