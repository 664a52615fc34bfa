"""Rotary embeddings (Su et al. 2021): queries and keys turned by an angle that grows with their position."""

from __future__ import annotations

import copy
import math
from functools import cache

import torch
from torch import Tensor

from trainshort.ops.dispatch import takes_kernels
from trainshort.ops.triton import run as triton_backend
from trainshort.ops.triton.call import Rotation
from trainshort.positions.position import Position, Shape
from trainshort.positions.scaling import Scaling

SLOW, FAST = 1.0, 32.0  # YaRN: turns within the trained length, up to which frequencies change, and from which not


class Rotary(Position):
    """Channel i of the first half turns with channel i of the second, at frequency base^(-2i/head_dim).

    scaling: for texts longer than those of the training, by a factor s. "ntk" takes the base times
    s^(head_dim/(head_dim-2)): the slowest channel turns s times as slowly, the fastest as before. "yarn" (Peng et al.
    2023) divides by s the frequencies of channels that turn less than once in trained_length, keeps those that turn
    32 times or more, blends between, and multiplies queries and keys by 0.1 ln s + 1. Without a factor it is the
    length of the text over trained_length, if that is above 1.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        base: float = 10000.0,
        scaling: str = "none",
        factor: float | None = None,
        trained_length: int | None = None,
    ) -> None:
        super().__init__()
        if shape.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {shape.head_dim}")
        if not base > 0:
            raise ValueError(f"rotary base must be positive, got {base}")
        self.scaling = Scaling(scaling, factor, trained_length).check("rotary", ("ntk", "yarn"), ("yarn",))
        if scaling == "ntk" and shape.head_dim < 4:
            raise ValueError(f"rotary scaling 'ntk' needs a head_dim of at least 4, got {shape.head_dim}")
        self.depends_on_length, self.factor = self.scaling.depends_on_length, self.scaling.at(0)
        self.head_dim, self.base = shape.head_dim, base

    def at_length(self, length: int, growing: bool = False) -> Position:
        factor = self.scaling.at(length)
        if factor == self.factor:
            return self
        if growing:
            raise ValueError(
                "rotary scaling by the length of a text turns all keys anew when it grows beyond the trained length "
                f"{self.scaling.trained_length}; keys in a cache stay as they are: give a factor, or a cache with "
                "the capacity of the whole text, or use no cache (use_cache=False)"
            )
        stretched = copy.copy(self)
        stretched.factor = factor
        return stretched

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if q.is_cuda and takes_kernels(q, k):
            return triton_backend.rotate(q, k, positions, self.rotation(q.device))
        if self.size != 1.0:
            q, k = q * self.size, k * self.size
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        frequencies = _frequencies(self.head_dim // 2, self.base, self.scaling, self.factor, q.device, dtype)
        angles = positions.to(dtype)[..., None] * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [B or 1, 1, T, half]
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def rotation(self, device: torch.device) -> Rotation:
        make = _frequencies if self.depends_on_length else _kept_frequencies
        frequencies = make(self.head_dim // 2, self.base, self.scaling, self.factor, device, torch.float32)
        return Rotation(frequencies, self.size)

    @property
    def size(self) -> float:
        """What queries and keys are multiplied by, so that scores are as if the softmax had a temperature."""
        return 0.1 * math.log(self.factor) + 1.0 if self.scaling.kind == "yarn" else 1.0

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, two = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, one * sin + two * cos), dim=-1).to(x.dtype)


def _frequencies(
    half: int, base: float, scaling: Scaling, factor: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    if scaling.kind == "ntk":
        base = base * factor ** (half / (half - 1))
    frequencies = torch.exp(-math.log(base) * (torch.arange(half, device=device, dtype=dtype) / half))
    if scaling.kind == "yarn":
        assert scaling.trained_length is not None
        turns = scaling.trained_length * frequencies / (2 * math.pi)
        kept = ((turns - SLOW) / (FAST - SLOW)).clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / factor)
    return frequencies


@cache
def _kept_frequencies(
    half: int, base: float, scaling: Scaling, factor: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Kept for good: a captured CUDA graph goes on reading them."""
    with torch.inference_mode(False):
        return _frequencies(half, base, scaling, factor, device, dtype)
