"""The loss of every scored token: short windows in batches, long ones in chunks through the cache.

Inside `ts.context_parallel` ranks share every window instead, a span each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainshort.evaluation.windows import Window
from trainshort.models.language_model import LanguageModel
from trainshort.ops.context import state
from trainshort.ops.context.parallel import ContextParallel


@torch.inference_mode()
def losses(
    model: LanguageModel,
    tokens: np.ndarray[Any, Any],
    windows: Iterable[Window],
    *,
    chunk: int,
    batch_tokens: int,
    on_scored: Callable[[int], None] | None = None,
) -> Iterator[tuple[Window, Tensor]]:
    """For each batch of windows of one shape its first window, and the losses [B, scored places]."""
    device = model.trunk.embedding.weight.device
    for batch in batches(windows, batch_tokens):
        first = batch[0]
        rows = np.stack([np.asarray(tokens[each.start : each.end + 1]) for each in batch]).astype(np.int64)
        found = _window_losses(model, torch.from_numpy(rows).to(device), first.skipped, chunk, on_scored)
        yield first, found


def batches(windows: Iterable[Window], batch_tokens: int) -> Iterator[list[Window]]:
    """Neighbours of one shape together, as many as batch_tokens allow."""
    batch: list[Window] = []
    for window in windows:
        alike = batch and (window.size, window.skipped) == (batch[0].size, batch[0].skipped)
        if batch and not (alike and (len(batch) + 1) * window.size <= batch_tokens):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _window_losses(
    model: LanguageModel, rows: Tensor, skipped: int, chunk: int, on_scored: Callable[[int], None] | None
) -> Tensor:
    """rows: int64 [B, size + 1], the inputs and, one further, their targets."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    batch, size = inputs.shape
    if state.current is not None:
        found = _losses_over_ranks(model, inputs, targets, state.current)[:, skipped:]
        if on_scored is not None:
            on_scored(found.numel())
        return found
    cache = model.make_cache(batch, size) if size > chunk else None
    parts = []
    for start in range(0, size, chunk):
        hidden = model.trunk(inputs[:, start : start + chunk], cache=cache)  # [B, part, d_model]
        context = min(max(skipped - start, 0), hidden.shape[1])  # places of this part that are not scored
        hidden, goal = hidden[:, context:], targets[:, start : start + chunk][:, context:]
        parts.append(model.head_loss(hidden, goal, reduction="none"))
        if on_scored is not None and goal.numel():
            on_scored(goal.numel())
    return torch.cat(parts, dim=1)


def _losses_over_ranks(model: LanguageModel, inputs: Tensor, targets: Tensor, parallel: ContextParallel) -> Tensor:
    """The losses of all places [B, size], of which each rank computes a span: it never holds more of the text."""
    size = inputs.shape[1]
    cuts = [size * rank // parallel.size for rank in range(parallel.size + 1)]
    own = slice(cuts[parallel.rank], cuts[parallel.rank + 1])
    hidden = model.trunk(inputs[:, own])
    losses = model.head_loss(hidden, targets[:, own], reduction="none")
    longest = max(end - start for start, end in itertools.pairwise(cuts))
    everyone = parallel.gather(torch.nn.functional.pad(losses, (0, longest - losses.shape[1])))
    return torch.cat(
        [part[:, : end - start] for part, (start, end) in zip(everyone, itertools.pairwise(cuts), strict=True)], dim=1
    )
