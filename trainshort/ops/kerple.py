"""KerpleBias: a penalty on distance with two learned numbers for each head (Chi et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainshort.ops.bias import Bias

NEVER = 2**40  # steps beyond which the bias would be the sum of a term of the query and one of the key


@dataclass(frozen=True, eq=False)
class KerpleBias(Bias):
    """KERPLE: a key d steps away costs `exponents * log(1 + strengths * d)`, or `strengths * d^exponents`.

    On either side.

    Args:
        strengths: [H], positive. Differentiable if it requires grad, like `exponents`.
        exponents: [H], positive.
        logarithmic: The first formula; otherwise the second, which with exponents of 1 is ALiBi.

    Example:
        >>> out = ts.attention(q, k, v, bias=ts.KerpleBias(torch.full((8,), 0.5), torch.ones(8)))
    """

    strengths: Tensor
    exponents: Tensor
    logarithmic: bool = True

    learned = ("strengths", "exponents")
    has_kernels = False

    def __post_init__(self) -> None:
        for name in self.learned:
            value = getattr(self, name)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                came = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"KerpleBias {name} must be a floating point tensor, got {came}")
            if value.dim() != 1:
                raise ValueError(f"KerpleBias {name} must be [heads], got shape {list(value.shape)}")

    @property
    def certifiable(self) -> bool:
        return not self.logarithmic

    @property
    def separable_beyond(self) -> int:
        return NEVER

    def check_shapes(self, q: Tensor, k: Tensor, causal: bool) -> None:
        for name in self.learned:
            value = getattr(self, name)
            if value.device != q.device:
                raise ValueError(f"{name} must be on q's device {q.device}, got {value.device}: move one of them")
            if value.shape[0] != q.shape[1]:
                raise ValueError(f"{name} must be [{q.shape[1]}] for this q, got {list(value.shape)}")

    def positive(self) -> dict[str, Tensor]:
        return {"strengths": self.strengths, "exponents": self.exponents}

    def part(self, rows: slice, heads: slice, keys: slice = slice(None)) -> KerpleBias:
        return replace(self, strengths=self.strengths[heads], exponents=self.exponents[heads])

    def at_distance(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (1, -1, *[1] * (distance.dim() - 2))
        strength, exponent = (value.to(dtype).view(shape) for value in (self.strengths, self.exponents))
        steps = distance.abs().to(dtype)
        return -exponent * torch.log1p(strength * steps) if self.logarithmic else -strength * steps**exponent

    def envelope(self, furthest: Tensor, reach: float) -> tuple[Tensor, Tensor]:
        """Slopes and rises [H], float64: a d^p is at least slope * d - rise at every distance d up to `furthest`.

        Where p < 1 the chord from 0 to `furthest`, else the tangent where a d^p is `reach`. Rounded down by more than
        what a few operations of float64 can lose; a line that float64 can't hold has slope 0.
        """
        strength, exponent = self.strengths.detach().double(), self.exponents.detach().double()
        chord = strength * furthest ** (exponent - 1.0)
        touch = (reach / strength) ** (1.0 / exponent)
        cost = strength * touch**exponent
        slope = torch.where(exponent < 1.0, chord, exponent * cost / touch) * (1.0 - 2.0**-40)
        rise = torch.where(exponent < 1.0, 0.0, (exponent - 1.0) * cost) * (1.0 + 2.0**-40)
        held = torch.isfinite(slope * furthest + rise)
        return torch.where(held, slope, 0.0), torch.where(held, rise, 0.0)

    def gradient_sums(self, batch: int, heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: torch.zeros((batch, heads), dtype=dtype, device=self.strengths.device) for name in self.learned}

    def add_gradients(
        self, sums: dict[str, Tensor], rows: slice, heads: slice, by_distance: Tensor, distance: Tensor
    ) -> None:
        dtype = by_distance.dtype
        strength, exponent = (value.detach()[heads, None].to(dtype) for value in (self.strengths, self.exponents))
        steps = distance.abs().to(dtype)
        if self.logarithmic:
            by_strength = -exponent * steps / (1.0 + strength * steps)
            by_exponent = -torch.log1p(strength * steps)
        else:
            by_strength = -(steps**exponent)
            by_exponent = by_strength * strength * steps.clamp_min(1.0).log()
        sums["strengths"][rows, heads] += (by_distance * by_strength).sum(-1)
        sums["exponents"][rows, heads] += (by_distance * by_exponent).sum(-1)

    def gradients(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: sums[name].sum(0).to(getattr(self, name).dtype) for name in self.learned}
