"""Forget gates from the input of a layer: one linear map, and the logarithm of its sigmoid."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SigmoidGates(nn.Module):
    """log sigmoid(w_h . x_t + b_h) for every head h and token t.

    bias: the initial b_h; 0 forgets half at each token, 5 less than a hundredth.
    sides: 1, or 2 for attention to both sides, with a map of its own for later keys.
    """

    def __init__(self, d_model: int, heads: int, *, bias: float, sides: int) -> None:
        super().__init__()
        self.sides = sides
        self.logits = nn.Linear(d_model, sides * heads)
        nn.init.normal_(self.logits.weight, std=0.02)
        nn.init.constant_(self.logits.bias, bias)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """x: [B, T, d_model] -> [B, heads, T], or a pair of such for two sides."""
        logits = self.logits(x)
        # In 16 bits a gate next to 1 would be 1, and a sum of small numbers wrong.
        log_gates = F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32))).transpose(1, 2)
        return log_gates if self.sides == 1 else log_gates.chunk(2, dim=1)
