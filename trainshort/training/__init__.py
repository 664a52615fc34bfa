"""Training: from a folder of tokens to a run, which can be interrupted at any moment and goes on exactly."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainshort.training.config import TrainConfig as TrainConfig
    from trainshort.training.launch import EndedByOthersError as EndedByOthersError
    from trainshort.training.recipes import RECIPES as RECIPES
    from trainshort.training.run import Interrupted as Interrupted
    from trainshort.training.run import RunFolder as RunFolder

# Loaded when first used: the command line reads the config of a command without waiting for torch. The function
# `train` is in trainshort.training.train, which it would hide here.
_HOMES = {
    "EndedByOthersError": "trainshort.training.launch",
    "Interrupted": "trainshort.training.run",
    "RECIPES": "trainshort.training.recipes",
    "RunFolder": "trainshort.training.run",
    "TrainConfig": "trainshort.training.config",
}

__all__ = ["RECIPES", "EndedByOthersError", "Interrupted", "RunFolder", "TrainConfig"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainshort.training' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
