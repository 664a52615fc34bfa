"""KERPLE (Chi et al. 2022): a penalty on distance, with two learned numbers for each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainshort.ops.bias import Bias
from trainshort.ops.kerple import KerpleBias
from trainshort.positions.position import Position, Shape

LEAST, LARGEST_POWER = 0.01, 2.0  # as published


class Kerple(Position):
    """A key d steps away costs p log(1 + a d), or a d^p; a and p are shared by all layers.

    kind: "log" or "power". As published a starts anywhere in [0, 1] and p in [0, 2]; both are kept at 0.01 or more,
    and the power at 2 or less.
    """

    def __init__(self, shape: Shape, *, kind: str = "log") -> None:
        super().__init__()
        if kind not in ("log", "power"):
            raise ValueError(f"kerple kind must be log or power, got {kind!r}")
        self.kind = kind
        self.a = nn.Parameter(torch.rand(shape.num_heads))
        self.p = nn.Parameter(2.0 * torch.rand(shape.num_heads))

    def bias(self) -> Bias | None:
        is_log = self.kind == "log"
        a, p = _held(self.a, LEAST, None), _held(self.p, LEAST, None if is_log else LARGEST_POWER)
        return KerpleBias(a, p, logarithmic=is_log)


def _held(stored: Tensor, low: float, high: float | None) -> Tensor:
    """Inside these limits, with the gradient of the number there: one that a step threw out can come back."""
    stored = stored.to(torch.promote_types(stored.dtype, torch.float32))
    return stored.detach().clamp(low, high) + (stored - stored.detach())
