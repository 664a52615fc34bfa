"""trainshort: attention with linear biases (ALiBi) for models that train short and test long."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LinearBias": "trainshort.attention",
    "BucketBias": "trainshort.attention",
    "alibi_attention": "trainshort.attention",
    "alibi_slopes": "trainshort.attention",
    "attention": "trainshort.attention",
    "backend_for": "trainshort.attention",
    "certified_windows": "trainshort.attention",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from trainshort.attention import BucketBias as BucketBias
    from trainshort.attention import LinearBias as LinearBias
    from trainshort.attention import alibi_attention as alibi_attention
    from trainshort.attention import alibi_slopes as alibi_slopes
    from trainshort.attention import attention as attention
    from trainshort.attention import backend_for as backend_for
    from trainshort.attention import certified_windows as certified_windows


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainshort' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
