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
    """A causal transformer with any position method: tokens in, logits out.

    Args:
        config: Its shape, with causal=True.

    Example:
        >>> model = ts.LanguageModel(ts.ModelConfig(d_model=64, num_layers=2, num_heads=4))
        >>> model(torch.randint(256, (1, 100))).shape
        torch.Size([1, 100, 256])
    """

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
        """The logits of every token.

        Args:
            tokens: int [B, T].
            cache: Tokens go on after those cached, and are added to them.
            key_padding_mask: bool [B, T], True for real tokens; with a cache, padding is on the left.
            cu_seqlens: Borders of documents packed into one row.
            last_only: Of the last token alone.

        Returns:
            Logits [B, T, V], or [B, 1, V] with `last_only`.
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
        """Cross entropy in nats, without ever holding all logits of a large vocabulary.

        Args:
            tokens: int [B, T].
            targets: int [B, T], the token that follows each.
            key_padding_mask: As in `forward`.
            cu_seqlens: As in `forward`.
            ignore_index: The target that does not count.
            reduction: "mean" over the targets that count, "sum", or "none".

        Returns:
            The loss, a number, or [B, T] with "none".

        Example:
            >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        """
        require_tokens("tokens", tokens)
        require_tokens("targets", targets)
        if targets.shape != tokens.shape:
            raise ValueError(f"targets must have the shape of tokens {list(tokens.shape)}, got {list(targets.shape)}")
        hidden = self.trunk(tokens, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens)
        return self.head_loss(hidden, targets, ignore_index=ignore_index, reduction=reduction)

    def make_cache(self, batch_size: int, capacity: int | None = None, **options: Any) -> KeyValueCache:
        """A cache in the dtype and on the device of the model.

        Args:
            batch_size: Rows.
            capacity: The most tokens it will hold; None: it grows.
            **options: Of `KeyValueCache`, such as bounded=True.

        Returns:
            A KeyValueCache.

        Example:
            >>> cache = model.make_cache(1)
            >>> logits = model.eval()(tokens, cache=cache, last_only=True)
        """
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
