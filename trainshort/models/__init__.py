"""Models: everything between tensors and training."""

from __future__ import annotations

from trainshort.models.alibi_transformer import ALiBiConfig, ALiBiTransformer
from trainshort.models.cache import KeyValueCache
from trainshort.models.checkpoints import load, save
from trainshort.models.config import ModelConfig
from trainshort.models.encoder import Encoder
from trainshort.models.language_model import LanguageModel
from trainshort.models.layers import CrossAttention
from trainshort.models.loss import linear_cross_entropy
from trainshort.models.ring_sizes import BoundedCacheError

__all__ = [
    "ALiBiConfig",
    "ALiBiTransformer",
    "BoundedCacheError",
    "CrossAttention",
    "Encoder",
    "KeyValueCache",
    "LanguageModel",
    "ModelConfig",
    "linear_cross_entropy",
    "load",
    "save",
]
