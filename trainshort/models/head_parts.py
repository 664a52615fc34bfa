"""Parts of attention that act on heads: norms of each or of all together, and the shift of keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HeadNorm(nn.Module):
    """RMSNorm of every head's channels, with weights of its own for each head."""

    def __init__(self, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads, width))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, heads, T, width]."""
        return (F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight[:, None]).to(x.dtype)

    def largest(self) -> Tensor:
        """The norm [heads] that no head's channels exceed after this, with a sixteenth for rounding in 16 bits."""
        weight = self.weight.detach().double()
        return weight.abs().amax(-1) * (weight.shape[-1] ** 0.5 * (1.0 + 2.0**-4))


class WideNorm(nn.LayerNorm):
    """LayerNorm over the channels of all heads together."""

    def __init__(self, heads: int, width: int, eps: float) -> None:
        super().__init__(heads * width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, heads, T, width]."""
        normed = super().forward(x.transpose(1, 2).flatten(2))
        return normed.unflatten(-1, (x.shape[1], x.shape[3])).transpose(1, 2)


class KeyValueShift(nn.Module):
    """Each key is mixed with the key of the token before, and each value with that value.

    k_t becomes a_t k_{t-1} + (1 - a_t) k_t, with a = sigmoid(W x) for each key head, and another one for values. The
    first token of a text has zeros before it.
    """

    def __init__(self, d_model: int, kv_heads: int) -> None:
        super().__init__()
        self.shares = nn.Linear(d_model, 2 * kv_heads, bias=False)

    def forward(self, x: Tensor, kv: Tensor, before: Tensor, positions: Tensor) -> Tensor:
        """Shifted keys and values [B, 2 kv_heads, T, width].

        x: the layer's normed input [B, T, d_model]; kv: keys, then values; before: those of the token before the
        first of these, [B, 2 kv_heads, 1, width]; positions: of the tokens in their own text, [B or 1, T].
        """
        is_first = (positions == 0)[:, None, :, None]
        earlier = torch.cat((before, kv), dim=2)[:, :, :-1].masked_fill(is_first, 0.0)
        shares = self.shares(x)
        shares = shares.to(torch.promote_types(shares.dtype, torch.float32)).sigmoid().transpose(1, 2)[..., None]
        return (shares * earlier + (1.0 - shares) * kv).to(kv.dtype)
