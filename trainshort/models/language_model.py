"""A causal language model: tokens in, logits out, with any position method."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainshort.models.bounded import BoundedCache
from trainshort.models.cache import KeyValueCache
from trainshort.models.config import ModelConfig
from trainshort.models.layers import Trunk, require_tokens
from trainshort.models.model import Model
from trainshort.positions import build_position


class LanguageModel(Model):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not config.causal:
            raise ValueError("LanguageModel needs causal=True; for attention to both sides use Encoder")
        self.config = config
        self.position = build_position(config.position, config.position_shape, config.position_options)
        self.trunk = Trunk(config, self.position)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        initialize(self, config)
        if config.tie_embeddings:
            self.tie()

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: KeyValueCache | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """tokens: int [B, T] -> logits [B, T, V], or [B, 1, V] of the last token with `last_only`.

        cache: tokens go on after those cached, and are added to them. key_padding_mask: bool [B, T], True for real
        tokens; left padding with a cache. cu_seqlens: borders of documents packed into one row.
        """
        hidden = self.trunk(tokens, cache=cache, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens)
        return self.head(hidden[:, -1:] if last_only else hidden)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Tensor:
        """Cross entropy of targets [B, T] in nats, without ever holding all logits of a large vocabulary.

        reduction: "mean" over the targets that count, "sum", or "none" for [B, T].
        """
        require_tokens("tokens", tokens)
        require_tokens("targets", targets)
        if targets.shape != tokens.shape:
            raise ValueError(f"targets must have the shape of tokens {list(tokens.shape)}, got {list(targets.shape)}")
        hidden = self.trunk(tokens, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens)
        return self.head_loss(hidden, targets, ignore_index=ignore_index, reduction=reduction)

    def make_cache(self, batch_size: int, capacity: int | None = None, **options: Any) -> KeyValueCache:
        """A cache in the dtype and on the device of the model. options: of KeyValueCache, such as bounded=True."""
        weight = self.trunk.embedding.weight
        cache = KeyValueCache(self.config, batch_size, capacity, dtype=weight.dtype, device=weight.device, **options)
        if self.config.qk_norm and isinstance(cache, BoundedCache):
            cache.expect_norms(*self.trunk.norm_bounds())
        return cache

    def generate(self, tokens: Tensor, **options: Any) -> Tensor:
        """Continue tokens [B, T]; see trainshort.models.generate.generate for the options."""
        from trainshort.models.generate import generate

        require_tokens("tokens", tokens)  # before Python misses an option
        return generate(self, tokens, **options)


def initialize(model: nn.Module, config: ModelConfig) -> None:
    """Small normal weights, smaller where a residual sum collects them; biases zero. Gates stay as they were made."""
    for name, module in model.named_modules():
        if ".gates." in name:
            continue
        if isinstance(module, nn.Linear):
            residual = name.endswith((".out", ".down"))
            nn.init.normal_(module.weight, std=0.02 / (2 * config.num_layers) ** 0.5 if residual else 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
