"""Data: from text files to a folder of tokens, and back into memory a window at a time. Knows nothing of models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainshort.data.config import PrepareConfig as PrepareConfig
    from trainshort.data.dataset import TokenData as TokenData
    from trainshort.data.tokenizer import load_tokenizer as load_tokenizer

# Loaded when first used: the command line reads the config of a command without waiting for numpy.
_HOMES = {
    "PrepareConfig": "trainshort.data.config",
    "TokenData": "trainshort.data.dataset",
    "load_tokenizer": "trainshort.data.tokenizer",
}

__all__ = ["PrepareConfig", "TokenData", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainshort.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
