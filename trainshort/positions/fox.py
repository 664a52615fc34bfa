"""FoX, the Forgetting Transformer (Lin et al. 2025): each token says how much of the past its head forgets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainshort.ops.triton.call import Rotation
from trainshort.positions.gates import SigmoidGates
from trainshort.positions.position import Position, Shape
from trainshort.positions.rotary import Rotary


class Fox(Position):
    """Forget gates f_t = sigmoid(w_h . x_t + b_h) in every layer; a key costs the log gates of all tokens after it.

    gate_bias: b_h at the start. 0 as published; x-transformers' data-dependent ALiBi starts at 5.
    rotary: turn queries and keys as well, with rotary_base.
    """

    def __init__(
        self, shape: Shape, *, gate_bias: float = 0.0, rotary: bool = False, rotary_base: float = 500000.0
    ) -> None:
        super().__init__()
        self.shape, self.gate_bias = shape, gate_bias
        self.rotary = Rotary(shape, base=rotary_base) if rotary else None

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.rotary is None else self.rotary.rotate(q, k, positions)

    def rotation(self, device: torch.device) -> Rotation | None:
        return None if self.rotary is None else self.rotary.rotation(device)

    def gates(self) -> nn.Module | None:
        shape = self.shape
        return SigmoidGates(shape.d_model, shape.num_heads, bias=self.gate_bias, sides=1 if shape.causal else 2)
