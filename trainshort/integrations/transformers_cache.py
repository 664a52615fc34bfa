"""Caches of transformers, with the norms from which a step of decoding finds its window.

Norms are kept on the very tensor of keys that they were measured from. Whatever puts another tensor in its place (to
reorder beams, to crop, to repeat or select rows, to move between devices) leaves them behind, and the next step
measures anew. What writes into the tensor changes its version: then too. A compiled step cannot see the version, and
inference mode has none: there a static cache compares the number of tokens that were measured with those in front of
the step, and if they differ, norms are infinite, which means that every key is read. (So a compiled step does not
notice that another model filled the same static cache, after a reset, to exactly the same length.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainshort.models.cache import norms_above
from trainshort.ops.problem import BLOCK
from trainshort.ops.values import trust_norms

FEW = 16  # queries: more read all keys in any case
# Keys from which a few queries on a GPU look for a window. Torch's dozen small operations for norms take the host as
# long as the GPU needs to read so many keys several times. Compiled, they cost next to nothing.
WORTH = 8192
ATTRIBUTE = "_trainshort_norms"


class Stored(NamedTuple):
    """All keys and values of a layer after new ones were written, with what attention must know of them."""

    keys: Tensor  # [B, Hkv, tokens or room, D]
    values: Tensor
    start: int | Tensor  # tokens before the new ones; int64 [] on the device of a static cache
    norms: Tensor | None  # upper bounds of the norms of blocks of keys, float32 [B, Hkv, blocks]


@dataclass
class KeyNorms:
    """The largest norm of each block of keys, from above, as an attribute of the tensor of keys."""

    blocks: Tensor  # float32 [B, Hkv, blocks]
    end: Tensor  # int64 []: tokens measured
    version: int | None  # of the tensor of keys when it was measured; None in inference mode


def store(cache: Any, layer_index: int, k: Tensor, v: Tensor) -> Stored:
    """Write the keys and values [B, Hkv, T, D] of new tokens into a layer of a transformers cache."""
    from transformers.cache_utils import DynamicLayer, StaticLayer

    start = cache.get_seq_length(layer_index)
    if isinstance(start, Tensor):  # a static cache counts in place
        start = start.clone()
        if start.device.type == "cpu" and not torch.compiler.is_compiling():
            start = int(start)
    before, known = _known_norms(cache, layer_index)
    keys, values = cache.update(k, v, layer_index)
    kind = type(cache.layers[layer_index])
    norms: Tensor | None = None
    if k.shape[2] <= FEW and _waits_for_host(keys) and keys.shape[2] < WORTH:
        return Stored(keys, values, start, None)
    if kind is StaticLayer:
        norms = _static_norms(keys, k.to(keys.dtype), start, known)
    elif kind is DynamicLayer and k.shape[2] <= FEW and not torch.compiler.is_compiling():
        norms = _dynamic_norms(keys, start, known, before)
    return Stored(keys, values, start, norms)


def _known_norms(cache: Any, layer_index: int) -> tuple[Tensor | None, KeyNorms | None]:
    """A layer's keys as they are, and the norms that were measured from them, if nothing was written since."""
    keys: Tensor | None = cache.layers[layer_index].keys if layer_index < len(cache.layers) else None
    known: KeyNorms | None = getattr(keys, ATTRIBUTE, None)
    if keys is None or known is None or torch.compiler.is_compiling():
        return keys, known
    return keys, known if known.version == _version(keys) else None


def _waits_for_host(keys: Tensor) -> bool:
    """Whether each operation is started by Python, one by one, and the GPU is done before the next one comes."""
    if not keys.is_cuda or torch.compiler.is_compiling():
        return False
    return not torch.cuda.is_current_stream_capturing()


def _version(keys: Tensor) -> int | None:
    return None if keys.is_inference() else keys._version


def _dynamic_norms(keys: Tensor, start: int, known: KeyNorms | None, before: Tensor | None) -> Tensor:
    """Norms of a cache that grows by copying. `before`: its keys without the new ones."""
    end, blocks = keys.shape[2], -(-keys.shape[2] // BLOCK)
    if known is None or known.version is None or before is None or before.shape[2] != start:
        found = _measure(keys)
    elif end == start + 1:
        own = _lengths(keys[:, :, start:end])
        if blocks == known.blocks.shape[2]:
            own = torch.maximum(own, known.blocks[:, :, -1:])
        found = torch.cat((known.blocks[:, :, : blocks - 1], own), dim=2)
    else:
        room = blocks - known.blocks.shape[2]
        kept = torch.nn.functional.pad(known.blocks, (0, room)) if room else known.blocks
        found = _with_new(kept, keys[:, :, start:end], start)
    trust_norms(found)
    setattr(keys, ATTRIBUTE, KeyNorms(found, torch.tensor(end), _version(keys)))
    return found


def _static_norms(keys: Tensor, new: Tensor, start: int | Tensor, known: KeyNorms | None) -> Tensor | None:
    """Norms of a cache with room for all tokens, in memory that stays where it is."""
    if known is None:
        return None if torch.compiler.is_compiling() else _measure_static(keys, start, new.shape[2])
    kept = known.blocks
    if torch.compiler.is_compiling() or known.version is None:
        kept = torch.where(known.end == start, kept, math.inf)
    known.blocks.copy_(_with_new(kept, new, start))
    _measured_up_to(known, keys, start + new.shape[2])
    return known.blocks


def _measure_static(keys: Tensor, start: int | Tensor, tokens: int) -> Tensor:
    """Norms of all keys that are there; where some were measured before, in the same memory, for CUDA graphs."""
    known: KeyNorms | None = getattr(keys, ATTRIBUTE, None)
    if known is None:
        with torch.inference_mode(keys.is_inference()):
            known = KeyNorms(_measure(keys), torch.zeros((), dtype=torch.int64, device=keys.device), None)
        setattr(keys, ATTRIBUTE, known)
        trust_norms(known.blocks)
        torch._dynamo.mark_static_address(known.blocks)  # as the cache does with its keys
        torch._dynamo.mark_static_address(known.end)
    else:
        known.blocks.copy_(_measure(keys))
    _measured_up_to(known, keys, start + tokens)
    return known.blocks


def _measured_up_to(known: KeyNorms, keys: Tensor, end: int | Tensor) -> None:
    known.end.copy_(torch.as_tensor(end))
    if not torch.compiler.is_compiling():
        known.version = _version(keys)


def _measure(keys: Tensor) -> Tensor:
    """Upper bounds for blocks of keys, [B, Hkv, blocks]: infinite where a norm is not known."""
    lengths = _lengths(keys)
    missing = -lengths.shape[2] % BLOCK
    return torch.nn.functional.pad(lengths, (0, missing)).unflatten(2, (-1, BLOCK)).amax(-1)


def _with_new(blocks: Tensor, new: Tensor, start: int | Tensor) -> Tensor:
    """Bounds for blocks when new keys were written from `start` on; nothing stands behind them any more."""
    lengths = _lengths(new)
    first = torch.arange(blocks.shape[2], device=blocks.device) * BLOCK
    block = (torch.arange(new.shape[2], device=blocks.device) + start) // BLOCK
    return torch.where(first < start, blocks, 0.0).scatter_reduce(2, block.expand_as(lengths), lengths, "amax")


def _lengths(keys: Tensor) -> Tensor:
    return norms_above(keys.detach()).nan_to_num(nan=math.inf, posinf=math.inf)
