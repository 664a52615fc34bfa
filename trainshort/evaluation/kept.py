"""How much of a long text certified windows keep, and how far each head reaches, by layer and head.

Measured on the queries, keys and biases of the model itself, chunk by chunk as evaluation runs: these are the very
blocks of keys that attention visits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainshort.evaluation.config import BLOCK
from trainshort.models.kept import attended, may_skip
from trainshort.models.language_model import LanguageModel
from trainshort.ops import certified_windows


@torch.inference_mode()
def kept_keys(model: LanguageModel, tokens: Tensor, chunk: int) -> dict[str, Any] | None:
    """Over the text tokens [1, T], or None where no key can be skipped because the bias is no penalty on distance.

    kept: the fraction of visible key blocks that are visited, [layers][heads]. reach, farthest: tokens from the
    last query of a block back to the first key it visits, on average and at most.
    """
    if not may_skip(model):
        return None
    layers, heads = model.config.num_layers, model.config.num_heads
    visited, reach, farthest = (torch.zeros(layers, heads, dtype=torch.float64) for _ in range(3))
    visible = blocks = 0
    cache = model.make_cache(1, tokens.shape[1])
    for start in range(0, tokens.shape[1], chunk):
        part = tokens[:, start : start + chunk]
        with attended(model) as seen:
            model.trunk(part, cache=cache)
        end = start + part.shape[1]
        last = torch.arange(start, end, BLOCK).add(BLOCK).clamp(max=end)  # one past the last query of each block
        visible += int((-(-last // BLOCK)).sum())
        blocks += len(last)
        for layer, (q, _, _, bias) in enumerate(seen):
            found = certified_windows(
                q,
                cache.keys[layer][:, :, :end],
                bias=bias,
                scale=model.config.score_scale,
                key_norms=cache.norms[layer][:, :, : -(-end // BLOCK)],
            )[0].cpu()  # [heads, blocks, 2]
            visited[layer] += (found[..., 1] - found[..., 0]).sum(-1)
            back = (last - found[..., 0] * BLOCK).double()
            reach[layer] += back.sum(-1)
            farthest[layer] = torch.maximum(farthest[layer], back.amax(-1))
    return {
        "kept": _table(visited / visible),
        "reach": _table(reach / blocks),
        "farthest": _table(farthest),
    }


def _table(values: Tensor) -> list[list[float]]:
    return [[round(value, 5) for value in row] for row in values.tolist()]
