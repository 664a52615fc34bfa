"""ALiBi: a penalty on distance, with a fixed or learned slope for each head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainshort.ops.bias import Bias, LinearBias, alibi_slopes
from trainshort.positions.position import Position, Shape

# Of the logarithms of trainable slopes. Below, no distance costs anything; above, everything but the query's own
# position is out of sight; and a slope times any distance stays far inside float32.
LOG_RANGE = (-30.0, 20.0)
PAPER_RANGE = (2.0**-8, 1.0)  # the paper's slopes lie in it, for every number of heads
FLOAT32 = torch.finfo(torch.float32)


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
        for slope in PAPER_RANGE if slopes is None else slopes:  # as numbers: tensors may have no values (meta)
            if not all(FLOAT32.tiny <= factor <= FLOAT32.max for factor in (slope, scale, slope * scale)):
                raise ValueError(
                    f"alibi slopes must be positive, got {slope} times scale {scale}; "
                    f"float32 holds {FLOAT32.tiny:.1e} to {FLOAT32.max:.1e}"
                )
        self.heads, self.scale = shape.num_heads, scale
        self.given = None if slopes is None else list(slopes)
        self.one_sided = one_sided
        self.trainable = trainable
        if trainable:
            self.log_slopes = nn.Parameter(self._initial().log())
        else:
            self.register_buffer("slopes", self._initial(), persistent=False)

    def _initial(self, device: torch.device | str | None = None) -> Tensor:
        if self.given is None:
            return alibi_slopes(self.heads, device) * self.scale
        return torch.tensor(self.given, dtype=torch.float32, device=device) * self.scale

    def _apply(self, function: Callable[..., Any], recurse: bool = True) -> Alibi:
        """Slopes move with the model but stay float32: rounded to 16 bits they would be wrong far away."""
        before = None if self.trainable else self.get_buffer("slopes")
        super()._apply(lambda tensor: _moved(function, tensor), recurse)
        if before is not None:
            device = self.get_buffer("slopes").device
            self.slopes = before if before.is_meta else before.to(device)
            self.materialize(device)
        return self

    def materialize(self, device: torch.device) -> None:
        if self.trainable and self.log_slopes.dtype != torch.float32:  # assigned from a checkpoint in another dtype
            self.log_slopes.data = self.log_slopes.data.float()
        if not self.trainable and self.get_buffer("slopes").is_meta:
            self.slopes = self._initial("cpu").to(device)  # computed where a model is usually built, to the same bits

    def _current(self) -> Tensor:
        if not self.trainable:
            return self.get_buffer("slopes")
        stored = self.log_slopes.float().clamp(FLOAT32.min, FLOAT32.max)  # infinity minus itself would be no number
        # The gradient passes as if there were no clamp: a slope that a large step threw out of it can come back.
        return (stored.detach().clamp(*LOG_RANGE) + (stored - stored.detach())).exp()

    def bias(self) -> Bias | None:
        slopes = self._current()
        return LinearBias.one_sided(slopes) if self.one_sided else LinearBias(slopes)


def _moved(function: Callable[..., Any], tensor: Tensor) -> Tensor:
    """What `function` makes of a tensor, but in float32."""
    moved = function(tensor)
    if moved.dtype == torch.float32:
        return moved
    return torch.empty_like(moved, dtype=torch.float32) if tensor.is_meta else tensor.float().to(moved.device)
