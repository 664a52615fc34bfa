"""ALiBi: a penalty on distance, with a fixed or learned slope for each head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainshort.ops.bias import Bias, LinearBias, alibi_slopes
from trainshort.ops.triton.call import Rotation
from trainshort.positions.position import Position, Shape
from trainshort.positions.rotary import Rotary
from trainshort.positions.scaling import Scaling

# Of the logarithms of trainable slopes. Below, no distance costs anything; above, everything but the query's own
# position is out of sight; and a slope times any distance stays far inside float32.
LOG_RANGE = (-30.0, 20.0)
PAPER_RANGE = (2.0**-8, 1.0)  # the paper's slopes lie in it, for every number of heads
FLOAT32 = torch.finfo(torch.float32)


class Alibi(Position):
    """Attention with linear biases.

    slopes: one a head, for those who hold only some heads of a larger model (tensor parallel); None: the paper's.
    A head of slope 0 sees everything alike.
    biased_heads: so many heads have slopes, the paper's for that number; the others have slope 0.
    trainable: learn the logarithm of the slopes, so that they stay positive.
    scale: multiplies all slopes, for models that scale the bias together with the scores.
    one_sided: in encoders, half of the heads see the past and half the future.
    scaling: for texts longer than those of the training. "linear" divides all slopes by factor, "ntk" those of the
    gentlest head alone, of the steepest none, of the others by powers of factor between. Without a factor it is the
    length of the text over trained_length, if that is above 1.
    rotary: turn queries and keys as well, with rotary_base.
    """

    def __init__(  # noqa: PLR0913  the options, by name
        self,
        shape: Shape,
        *,
        slopes: Sequence[float] | None = None,
        biased_heads: int | None = None,
        trainable: bool = False,
        scale: float = 1.0,
        one_sided: bool = False,
        scaling: str = "none",
        factor: float | None = None,
        trained_length: int | None = None,
        rotary: bool = False,
        rotary_base: float = 10000.0,
    ) -> None:
        super().__init__()
        if one_sided and shape.causal:
            raise ValueError("alibi one_sided is for encoders: causal attention sees the past alone")
        self.heads, self.scale, self.biased_heads = shape.num_heads, scale, biased_heads
        self.given = None if slopes is None else list(slopes)
        self.has_flat_heads = 0 in (self.given or ()) or (self.biased_heads or self.heads) < self.heads
        self._check_slopes(trainable)
        self.scaling = Scaling(scaling, factor, trained_length).check("alibi", ("linear", "ntk"))
        self.depends_on_length, self.factor = self.scaling.depends_on_length, self.scaling.at(0)
        self.rotary = Rotary(shape, base=rotary_base) if rotary else None
        self.one_sided, self.trainable = one_sided, trainable
        if trainable:
            self.log_slopes = nn.Parameter(self._initial().log())
        else:
            self.register_buffer("slopes", self._initial(), persistent=False)

    def _check_slopes(self, trainable: bool) -> None:
        """Of numbers alone: tensors may have no values (meta)."""
        if self.given is not None and len(self.given) != self.heads:
            raise ValueError(f"alibi slopes must be one for each of {self.heads} heads, got {len(self.given)}")
        if self.biased_heads is not None and (self.given is not None or self.biased_heads > self.heads):
            raise ValueError(
                f"alibi biased_heads must be at most the {self.heads} heads, and slopes not be given: got "
                f"{self.biased_heads} and slopes {self.given}"
            )
        for slope in PAPER_RANGE if self.given is None else self.given:
            factors = (slope, self.scale, slope * self.scale) if slope != 0 else (self.scale,)
            if not all(FLOAT32.tiny <= factor <= FLOAT32.max for factor in factors):
                raise ValueError(
                    f"alibi slopes must be 0 or positive, got {slope} times scale {self.scale}; "
                    f"float32 holds {FLOAT32.tiny:.1e} to {FLOAT32.max:.1e}"
                )
        if trainable and self.has_flat_heads:
            raise ValueError("alibi trainable slopes are positive: heads of slope 0 cannot learn one")

    def _initial(self, device: torch.device | str | None = None) -> Tensor:
        if self.given is None:
            slopes = alibi_slopes(self.biased_heads or self.heads, device)
            slopes = torch.nn.functional.pad(slopes, (0, self.heads - len(slopes))) * self.scale
        else:
            slopes = torch.tensor(self.given, dtype=torch.float32, device=device) * self.scale
        return slopes if self.trainable or self.depends_on_length else self._stretched(slopes)

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

    def at_length(self, length: int, growing: bool = False) -> Position:
        factor = self.scaling.at(length)
        if factor == self.factor:
            return self
        stretched = copy.copy(self)
        stretched.factor = factor
        return stretched

    def _stretched(self, slopes: Tensor) -> Tensor:
        """The slopes [heads] for texts `factor` times as long as those of the training."""
        if self.scaling.kind == "linear":
            return slopes / self.factor
        if self.scaling.kind != "ntk":
            return slopes
        place = slopes.detach().argsort(descending=True, stable=True).argsort()  # the steepest head is the first
        last = (slopes.detach() > 0).sum().sub(1).clamp_min(1)
        return slopes * self.factor ** -(place / last)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.rotary is None else self.rotary.rotate(q, k, positions)

    def rotation(self, device: torch.device) -> Rotation | None:
        return None if self.rotary is None else self.rotary.rotation(device)

    def bias(self) -> Bias | None:
        slopes = self._current()
        if self.factor != 1.0 and (self.trainable or self.depends_on_length):
            slopes = self._stretched(slopes)
        return LinearBias.one_sided(slopes) if self.one_sided else LinearBias(slopes)


def _moved(function: Callable[..., Any], tensor: Tensor) -> Tensor:
    """What `function` makes of a tensor, but in float32."""
    moved = function(tensor)
    if moved.dtype == torch.float32:
        return moved
    return torch.empty_like(moved, dtype=torch.float32) if tensor.is_meta else tensor.float().to(moved.device)
