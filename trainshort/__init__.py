"""trainshort: attention with linear biases (ALiBi) for models that train short and test long."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LinearBias": "trainshort.ops",
    "AttentionOutput": "trainshort.ops",
    "BucketBias": "trainshort.ops",
    "DecayBias": "trainshort.ops",
    "KerpleBias": "trainshort.ops",
    "Windows": "trainshort.ops",
    "alibi_attention": "trainshort.ops",
    "alibi_slopes": "trainshort.ops",
    "attention": "trainshort.ops",
    "backend_for": "trainshort.ops",
    "certified_windows": "trainshort.ops",
    "context_parallel": "trainshort.ops.context.parallel",
    "explain": "trainshort.ops",
    "ModelConfig": "trainshort.models",
    "LanguageModel": "trainshort.models",
    "Encoder": "trainshort.models",
    "CrossAttention": "trainshort.models",
    "KeyValueCache": "trainshort.models",
    "BoundedCacheError": "trainshort.models",
    "ALiBiConfig": "trainshort.models",
    "ALiBiTransformer": "trainshort.models",
    "linear_cross_entropy": "trainshort.models",
    "load": "trainshort.models",
    "save": "trainshort.models",
    "patch": "trainshort.integrations.transformers",
    "unpatch": "trainshort.integrations.transformers",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from trainshort.integrations.transformers import patch as patch
    from trainshort.integrations.transformers import unpatch as unpatch
    from trainshort.models import ALiBiConfig as ALiBiConfig
    from trainshort.models import ALiBiTransformer as ALiBiTransformer
    from trainshort.models import BoundedCacheError as BoundedCacheError
    from trainshort.models import CrossAttention as CrossAttention
    from trainshort.models import Encoder as Encoder
    from trainshort.models import KeyValueCache as KeyValueCache
    from trainshort.models import LanguageModel as LanguageModel
    from trainshort.models import ModelConfig as ModelConfig
    from trainshort.models import linear_cross_entropy as linear_cross_entropy
    from trainshort.models import load as load
    from trainshort.models import save as save
    from trainshort.ops import AttentionOutput as AttentionOutput
    from trainshort.ops import BucketBias as BucketBias
    from trainshort.ops import DecayBias as DecayBias
    from trainshort.ops import KerpleBias as KerpleBias
    from trainshort.ops import LinearBias as LinearBias
    from trainshort.ops import Windows as Windows
    from trainshort.ops import alibi_attention as alibi_attention
    from trainshort.ops import alibi_slopes as alibi_slopes
    from trainshort.ops import attention as attention
    from trainshort.ops import backend_for as backend_for
    from trainshort.ops import certified_windows as certified_windows
    from trainshort.ops import explain as explain
    from trainshort.ops.context.parallel import context_parallel as context_parallel


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainshort' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
