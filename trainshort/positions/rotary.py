"""Rotary embeddings (Su et al. 2021): queries and keys turned by an angle that grows with their position."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from trainshort.ops.dispatch import takes_kernels
from trainshort.ops.triton import run as triton_backend
from trainshort.positions.position import Position, Shape


class Rotary(Position):
    """Channel i of the first half turns with channel i of the second, at frequency base^(-2i/head_dim)."""

    def __init__(self, shape: Shape, *, base: float = 10000.0) -> None:
        super().__init__()
        if shape.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {shape.head_dim}")
        if not base > 0:
            raise ValueError(f"rotary base must be positive, got {base}")
        self.head_dim, self.base = shape.head_dim, base

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if q.is_cuda and takes_kernels(q, k):
            return triton_backend.rotate(q, k, positions, _kept_frequencies(self.head_dim // 2, self.base, q.device))
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        angles = positions.to(dtype)[..., None] * _frequencies(self.head_dim // 2, self.base, q.device, dtype)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [B or 1, 1, T, half]
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, two = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, one * sin + two * cos), dim=-1).to(x.dtype)


def _frequencies(half: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.exp(-math.log(base) * (torch.arange(half, device=device, dtype=dtype) / half))


@cache
def _kept_frequencies(half: int, base: float, device: torch.device) -> Tensor:
    """Kept for good: a captured CUDA graph goes on reading them."""
    with torch.inference_mode(False):
        return _frequencies(half, base, device, torch.float32)
