"""What transformers makes of an attention mask: for a patched model, padding and nothing else.

Models of transformers ask for their causal mask by a name in their config. Under the name below they get no mask of
length x length but the padding of the keys, bool [B, keys], True where a key is real; without padding [B, 0], because
MPT wants a tensor. Causality is attention's own business.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "trainshort_padding"


def register() -> None:
    """Make the name known to transformers. The only thing that is changed for the whole process; harmless twice."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, padding_of)


def padding_of(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    """Padding for q_length queries after q_offset others: bool [B, kv_length], or [B, 0] where there is none.

    Whether there is any is looked at once a call of the model, and not while a compiler or a CUDA graph records.
    """
    none = torch.ones((batch_size, 0), dtype=torch.bool, device=device)
    if attention_mask is None or attention_mask.shape[1] == 0:  # what this returned comes back from `generate`
        return none
    if (rows := attention_mask.shape[0]) != batch_size:
        raise ValueError(f"attention_mask must have a row for each row of the batch: {batch_size}; it has {rows}")
    seen = q_offset + q_length
    _check_width(attention_mask.shape[1], seen, kv_length)
    mask = torch.nn.functional.pad(attention_mask, (0, kv_length - attention_mask.shape[1]))
    if _may_look_at(mask):
        if bool((mask == (torch.arange(kv_length, device=mask.device) < seen)).all()):
            return none
        _refuse_holes(mask)
    return mask


def _check_width(width: int, seen: int | Tensor, keys: int) -> None:
    """A mask has a column for each token seen, or for each key, of which a static cache has more."""
    if isinstance(seen, Tensor):  # on a GPU it would have to be waited for
        seen = width
    if width == seen > keys:
        raise ValueError(
            f"the cache has room for {keys} tokens, and {width} are to go there: make one with a larger max_cache_len"
        )
    if seen > keys or width not in (seen, keys):
        raise ValueError(
            f"attention_mask must have a column for each token, cached ones included: {seen}; it has {width}"
        )


def _may_look_at(mask: Tensor) -> bool:
    if torch.compiler.is_compiling() or mask.device.type == "meta":
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def _refuse_holes(mask: Tensor) -> None:
    edges = (mask[:, 1:] != mask[:, :-1]).sum(-1) + mask[:, 0] + mask[:, -1]
    holes = (edges > 2).nonzero()
    if len(holes):
        raise ValueError(
            f"attention_mask must be one run of ones a row, got a hole in row {int(holes[0])}: what a hole means to "
            "distances differs from model to model. Pad on the left or on the right; and give `generate` a mask, "
            "because without one it takes every padding token inside a text for padding"
        )
