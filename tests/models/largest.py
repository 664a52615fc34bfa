"""How much memory a computation takes: its largest tensor, or all of them together at the worst moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operator made. Does not see inside operators
    that are registered by this package."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


def peak_bytes(function: Callable[[], object]) -> int:
    """Bytes of CPU tensors that a call had allocated at the worst moment, inside operators too."""
    options: dict[str, Any] = {"profile_memory": True, "acc_events": True}  # without the second torch 2.11 warns
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profile:
        kept = function()
    del kept
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    assert highest > 0
    return highest
