"""The arguments of torch's scaled_dot_product_attention, in a call that was written for it.

Those that mean the same here are taken. The others are answered with a sentence that names the argument to use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MASKS = (
    "for padding pass key_padding_mask (bool [batch, keys], True where a key is real), for packed documents "
    "cu_seqlens, and for earlier keys alone causal=True"
)
BIASES = (
    "for a bias that depends on distance pass slopes to alibi_attention, or bias to attention (a LinearBias, "
    "BucketBias, DecayBias or KerpleBias)"
)


class SdpaArguments(NamedTuple):
    """As they were given; None where they were not."""

    is_causal: bool | None
    attn_mask: None
    dropout_p: float | None
    enable_gqa: bool | None


def causal_and_dropout(
    given: SdpaArguments, q: Tensor, k: Tensor, query_start: int | Tensor | None, causal: bool, dropout: float
) -> tuple[bool, float]:
    """What `causal` and `dropout` are with these arguments beside them."""
    if given.attn_mask is not None:
        raise TypeError(f"attn_mask must be None, got {_named(given.attn_mask)}: {_instead_of(given.attn_mask)}")
    for name in ("is_causal", "enable_gqa"):
        value = getattr(given, name)
        if not (value is None or isinstance(value, bool)):
            raise TypeError(f"{name} must be True or False, got {type(value).__name__}")
    if isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == 4 and k.dim() == 4:  # others are refused later
        _check_shapes(given, q, k, query_start)
    if given.is_causal is not None:
        if given.is_causal and not causal:
            raise ValueError(f"causal={causal} and is_causal=True differ: pass one of them")
        causal = given.is_causal
    if given.dropout_p is not None:
        if dropout not in (0.0, given.dropout_p):
            raise ValueError(f"dropout={dropout} and dropout_p={given.dropout_p} differ: pass one of them")
        dropout = given.dropout_p
    return causal, dropout


def _check_shapes(given: SdpaArguments, q: Tensor, k: Tensor, query_start: int | Tensor | None) -> None:
    """Refuse what torch reads in another way than we do."""
    if given.is_causal and query_start is None and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"is_causal=True with {q.shape[2]} queries and {k.shape[2]} keys: torch puts the first query at the "
            "first key, and causal=True here the last query at the last key, as decoding wants it: pass causal=True "
            "for that, and query_start=0 besides for what torch does"
        )
    if given.enable_gqa is False and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"enable_gqa=False, but q has {q.shape[1]} heads and k has {k.shape[1]}: grouped queries are always on "
            "here, so leave enable_gqa out, or pass k and v with as many heads as q"
        )


def refuse_mask_as_slopes(q: Tensor, k: Tensor, slopes: Tensor) -> None:
    """Where torch's call has a mask, as its fourth argument, alibi_attention has the slopes [H] or [B, H]."""
    is_mask = slopes.dtype == torch.bool
    if not is_mask and isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == 4 and k.dim() == 4:
        is_mask = slopes.shape != q.shape[:2] and slopes.shape[-2:] == (q.shape[2], k.shape[2])
    if is_mask:
        came = f"the fourth argument is slopes, and {_named(slopes)} looks like an attention mask"
        raise TypeError(f"{came}: {_instead_of(slopes)}")


def _named(mask: object) -> str:
    return f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__


def _instead_of(mask: object) -> str:
    return f"{BIASES}; {MASKS}" if isinstance(mask, Tensor) and mask.dtype != torch.bool else MASKS
