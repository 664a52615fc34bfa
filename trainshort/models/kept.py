"""What share of the keys certified windows keep, on the queries and keys that a model itself computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from trainshort.models.language_model import LanguageModel
from trainshort.ops import certified_windows
from trainshort.ops.problem import BLOCK


@torch.no_grad()
def share_of_keys(model: LanguageModel, tokens: Tensor) -> float | None:
    """Of the key blocks in sight of the text tokens [1, T], the share that is visited, over all layers and heads.

    None where no key can be skipped because the bias is no penalty on distance.
    """
    bias = model.position.at_length(tokens.shape[1]).bias()
    if bias is None or not bias.certifiable:
        return None
    with queries_and_keys(model) as seen:
        model.trunk(tokens)
    blocks = -(-tokens.shape[1] // BLOCK)
    visible = len(seen) * model.config.num_heads * blocks * (blocks + 1) // 2
    windows = torch.stack(
        [certified_windows(q, k, bias=bias, scale=model.config.score_scale, block=BLOCK) for q, k in seen]
    )
    return int((windows[..., 1] - windows[..., 0]).sum()) / visible


@contextlib.contextmanager
def queries_and_keys(model: LanguageModel) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collects queries [B, H, T, D] and keys [B, Hkv, T, D] of each layer as they come out of the position method."""
    seen: list[tuple[Tensor, Tensor]] = []
    position = model.position
    rotate = position.rotate

    def watched(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(rotate(q, k, positions))
        return seen[-1]

    position.__dict__["rotate"] = watched  # before the method of the class
    try:
        yield seen
    finally:
        del position.__dict__["rotate"]
