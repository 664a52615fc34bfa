"""Sinusoidal embeddings (Vaswani et al. 2017): sines and cosines of the position, added to the input."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainshort.positions.position import Position, Shape


class Sinusoidal(Position):
    """Frequencies from 1 to 1/base, geometrically; the first half of the channels sines, the second cosines.

    As published, token embeddings are multiplied by sqrt(d_model) first: small initial embeddings would drown in the
    sines otherwise, and the method look worse than it is.
    """

    def __init__(self, shape: Shape, *, base: float = 10000.0) -> None:
        super().__init__()
        if shape.d_model % 2:
            raise ValueError(f"sinusoidal positions need an even d_model, got {shape.d_model}")
        if not base > 0:
            raise ValueError(f"sinusoidal base must be positive, got {base}")
        self.d_model, self.base = shape.d_model, base

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.d_model // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32) / max(half - 1, 1)
        angles = positions.float()[..., None] * torch.exp(-math.log(self.base) * steps)  # [B or 1, T, d_model / 2]
        return x * self.d_model**0.5 + torch.cat((angles.sin(), angles.cos()), dim=-1).to(x.dtype)
