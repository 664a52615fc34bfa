"""trainshort: attention with linear biases (ALiBi) for models that train short and test long."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
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
    "ModelConfig": "trainshort.models",
    "LanguageModel": "trainshort.models",
    "Encoder": "trainshort.models",
    "CrossAttention": "trainshort.models",
    "KeyValueCache": "trainshort.models",
    "ALiBiConfig": "trainshort.models",
    "ALiBiTransformer": "trainshort.models",
    "load": "trainshort.models",
    "save": "trainshort.models",
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
    from trainshort.models import ALiBiConfig as ALiBiConfig
    from trainshort.models import ALiBiTransformer as ALiBiTransformer
    from trainshort.models import CrossAttention as CrossAttention
    from trainshort.models import Encoder as Encoder
    from trainshort.models import KeyValueCache as KeyValueCache
    from trainshort.models import LanguageModel as LanguageModel
    from trainshort.models import ModelConfig as ModelConfig
    from trainshort.models import load as load
    from trainshort.models import save as save


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainshort' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps `trainshort.attention` a function.

    It is also the name of a package, and Python sets a package as an attribute of its parent when it is first
    imported. Setting it stores the function instead; `from trainshort.attention import ...` works as ever.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "attention" and isinstance(value, ModuleType):
            value = value.attention
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
