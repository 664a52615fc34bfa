"""What share of the keys certified windows keep, on the queries, keys and biases that a model itself computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainshort.models.language_model import LanguageModel
from trainshort.models.model import Model
from trainshort.ops import certified_windows
from trainshort.ops.bias import Bias
from trainshort.ops.problem import BLOCK


class Attended(NamedTuple):
    """What the attention of one layer compares."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]: of the new tokens, where there is a cache
    v: Tensor  # like k
    bias: Bias | None


def may_skip(model: Model) -> bool:
    """Whether the bias of the model's layers is one under which keys can be skipped."""
    bias = model.position.bias()
    return model.config.has_gates or (bias is not None and bias.certifiable)


@torch.no_grad()
def share_of_keys(model: LanguageModel, tokens: Tensor) -> float | None:
    """Of the key blocks in sight of the text tokens [1, T], the share that is visited, over all layers and heads.

    None where no key can be skipped because the bias is no penalty on distance.
    """
    if not may_skip(model):
        return None
    visited: list[Tensor] = []

    def look(layer: Attended) -> None:
        """At once: the queries and keys of all layers together may take more memory than training does."""
        windows = certified_windows(layer.q, layer.k, bias=layer.bias, scale=model.config.score_scale, block=BLOCK)
        visited.append((windows[..., 1] - windows[..., 0]).sum())

    with watched(model, look):
        model.trunk(tokens)
    blocks = -(-tokens.shape[1] // BLOCK)
    visible = len(visited) * model.config.num_heads * blocks * (blocks + 1) // 2
    return int(torch.stack(visited).sum()) / visible


@contextlib.contextmanager
def attended(model: LanguageModel) -> Iterator[list[Attended]]:
    """Collects what the attention of each layer compares, as long as the context is open."""
    seen: list[Attended] = []
    with watched(model, seen.append):
        yield seen


@contextlib.contextmanager
def watched(model: Model, look: Callable[[Attended], None]) -> Iterator[None]:
    """Shows `look` what the attention of each layer compares, layer after layer, as long as the context is open."""
    layers = [block.attention for block in model.trunk.blocks]

    def watch(layer: Any) -> None:
        attend = layer.attend

        def attend_watched(q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, context: Any) -> Tensor:
            look(Attended(q, k, v, bias))
            out: Tensor = attend(q, k, v, bias, context)
            return out

        layer.__dict__["attend"] = attend_watched  # before the method of the class

    for layer in layers:
        watch(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["attend"]
