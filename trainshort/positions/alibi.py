"""ALiBi: a penalty on distance, with a fixed or learned slope for each head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainshort.attention.bias import Bias, LinearBias, alibi_slopes
from trainshort.positions.position import Position, Shape

LOG_RANGE = (-30.0, 20.0)  # of trainable slopes: beyond, their exponential leaves the range of float32


class Alibi(Position):
    """Attention with linear biases.

    slopes: one a head, for those who hold only some heads of a larger model (tensor parallel); None: the paper's.
    trainable: learn the logarithm of the slopes, so that they stay positive.
    scale: multiplies all slopes, for models that scale the bias together with the scores.
    one_sided: in encoders, half of the heads see the past and half the future.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        slopes: Sequence[float] | None = None,
        trainable: bool = False,
        scale: float = 1.0,
        one_sided: bool = False,
    ) -> None:
        super().__init__()
        if slopes is not None and len(slopes) != shape.num_heads:
            raise ValueError(f"alibi slopes must be one for each of {shape.num_heads} heads, got {len(slopes)}")
        if one_sided and shape.causal:
            raise ValueError("alibi one_sided is for encoders: causal attention sees the past alone")
        values = alibi_slopes(shape.num_heads) if slopes is None else torch.tensor(slopes, dtype=torch.float32)
        values = values * scale
        good = (values > 0) & torch.isfinite(values)
        if not bool(good.all()):
            raise ValueError(f"alibi slopes must be positive, got {values[~good][0].item()}")
        self.one_sided = one_sided
        self.trainable = trainable
        if trainable:
            self.log_slopes = nn.Parameter(values.log())
        else:
            self.register_buffer("slopes", values, persistent=False)

    def _apply(self, function: Callable[..., Any], recurse: bool = True) -> Alibi:
        """Fixed slopes move with the model but stay float32: rounded to 16 bits they would be wrong far away."""
        before = None if self.trainable else self.get_buffer("slopes")
        super()._apply(function, recurse)
        if before is not None:
            self.slopes = before.to(self.get_buffer("slopes").device)
        return self

    def _current(self) -> Tensor:
        if self.trainable:
            return self.log_slopes.float().clamp(*LOG_RANGE).exp()
        return self.get_buffer("slopes")

    def bias(self) -> Bias:
        slopes = self._current()
        return LinearBias.one_sided(slopes) if self.one_sided else LinearBias(slopes)
