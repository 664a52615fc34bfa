"""A position method is one object with a hook for each place at which published methods act.

The model calls all hooks, always, and knows nothing else of positions. A new method is one new file with one
subclass of `Position`, and one line in `positions/table.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainshort.ops.bias import Bias
from trainshort.ops.triton.call import Rotation


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a position method may want to know of the model it is built for."""

    d_model: int
    num_heads: int
    head_dim: int
    causal: bool = True
    max_length: int | None = None


class Position(nn.Module):
    """No position information at all; subclasses add theirs at one or more of the hooks."""

    max_length: int | None = None  # the longest sequence the method can represent; None: any
    label: str | None = None  # what reports call it; None: the name it has in the table
    has_flat_heads: bool = False  # whether some heads of a linear bias are known to have slope 0
    depends_on_length: bool = False  # whether `at_length` may give another method than this one

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "rotate" in vars(cls) and "rotation" not in vars(cls):
            cls.rotation = Position.rotation  # type: ignore[method-assign]  # another one's would no longer say the same

    def at_length(self, length: int, growing: bool = False) -> Position:
        """The method as it is for a text of this many tokens: the model calls the other hooks of that one.

        growing: what comes later may make the text longer, and keys that are turned now stay as they are in a cache.
        """
        return self

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add to the token embeddings. x: [B, T, d_model]; positions: int64 [B or 1, T]."""
        return x

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Change queries and keys before their product. q, k: [B, heads, T, head_dim]."""
        return q, k

    def rotation(self, device: torch.device) -> Rotation | None:
        """What `rotate` does, if that is a rotary embedding: a step on a GPU turns keys as it stores them."""
        return None

    def bias(self) -> Bias | None:
        """Describe what to add to the scores: a function of distance, never a tensor of all pairs."""
        return None

    def gates(self) -> nn.Module | None:
        """A module for one layer, with parameters of its own: called once for each layer when a model is built.

        It turns what queries and keys are made from, the layer's normed input [B, T, d_model], into the logarithm of
        a forget gate for each query head and token, [B, heads, T], at most 0: the bias of a key is the sum of those
        of all tokens after it (ts.DecayBias). Without `causal` into a pair of such, for earlier and for later keys.
        Gates see one token at a time: with a cache they are called for the new tokens alone.
        """
        return None

    def materialize(self, device: torch.device) -> None:
        """After loading: make what no checkpoint holds (fixed tables) if it has no values yet, as after a start on
        the meta device, and bring tensors that have a dtype of their own back to it."""
