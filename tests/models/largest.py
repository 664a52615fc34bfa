"""How large the largest tensor was that a computation made."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operator made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out
