"""A bidirectional encoder: hidden states, a masked-token head, mean pooling."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainshort.models.config import ModelConfig, require_config
from trainshort.models.language_model import initialize
from trainshort.models.layers import Trunk, make_norm, require_tokens
from trainshort.models.linear import ACTIVATIONS
from trainshort.models.model import Model
from trainshort.models.transformers_arguments import ENCODER, instead_of
from trainshort.ops.context import state
from trainshort.positions import build_position


class Encoder(Model):
    """A transformer that sees both sides: hidden states, a head for masked tokens, mean pooling.

    Args:
        config: Its shape, with causal=False.

    Example:
        >>> encoder = ts.Encoder(ts.ModelConfig(d_model=64, num_layers=2, num_heads=4, causal=False))
        >>> encoder(tokens).shape
        torch.Size([1, 20, 64])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        require_config(config)
        if config.causal:
            raise ValueError("Encoder sees both sides: its config needs causal=False")
        self.config = config
        self.position = build_position(config.position, config.position_shape, config.position_options)
        self.trunk = Trunk(config, self.position)
        if config.masked_head:
            self.head_dense = nn.Linear(config.d_model, config.d_model)
            self.head_norm = make_norm(config)
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        initialize(self, config)
        if config.masked_head and config.tie_embeddings:
            self.tie()

    @instead_of(ENCODER)
    def forward(
        self, tokens: Tensor, key_padding_mask: Tensor | None = None, *, token_types: Tensor | None = None
    ) -> Tensor:
        """The hidden states of every token.

        Args:
            tokens: int [B, T].
            key_padding_mask: bool [B, T], True for real tokens.
            token_types: int [B, T], the segment of each token, for models that have them; None: all of them 0.

        Returns:
            Hidden states [B, T, d_model].
        """
        return self.trunk(tokens, key_padding_mask=key_padding_mask, token_types=token_types)

    def logits(self, hidden: Tensor) -> Tensor:
        """What the head for masked tokens makes of hidden states.

        Args:
            hidden: [..., d_model].

        Returns:
            Logits [..., V].
        """
        self._require_head()
        return self.head(self._before_head(hidden))

    def _before_head(self, hidden: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.config.activation]
        return self.head_norm(activation(self.head_dense(hidden)))

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """The loss of masked tokens. Only these get logits.

        Args:
            tokens: int [B, T].
            targets: int [B, T], the token that was masked, or -100 where none was.
            key_padding_mask: As in `forward`.
            token_types: As in `forward`.

        Returns:
            The mean over targets that are not -100.
        """
        require_tokens("tokens", tokens)
        require_tokens("targets", targets)
        if targets.shape != tokens.shape:
            raise ValueError(f"targets must have the shape of tokens {list(tokens.shape)}, got {list(targets.shape)}")
        self._require_head()
        hidden = self(tokens, key_padding_mask, token_types=token_types)
        chosen = targets != -100
        return self.head_loss(self._before_head(hidden[chosen]), targets[chosen])

    def pool(
        self, tokens: Tensor, key_padding_mask: Tensor | None = None, *, token_types: Tensor | None = None
    ) -> Tensor:
        """One vector a text: the mean of the hidden states of its real tokens.

        Args:
            tokens: As in `forward`, like all others.
            key_padding_mask: True for real tokens.
            token_types: Segments.

        Returns:
            Vectors [B, d_model], not normalised.
        """
        if state.current is not None:
            raise ValueError(
                "pool() averages whole texts, and inside context_parallel a rank has a span of each: add up what "
                "encoder(tokens) gives over ranks"
            )
        hidden = self(tokens, key_padding_mask, token_types=token_types)
        if key_padding_mask is None:
            return hidden.mean(1)
        weight = key_padding_mask[..., None].to(torch.promote_types(hidden.dtype, torch.float32))
        return ((hidden * weight).sum(1) / weight.sum(1).clamp_min(1)).to(hidden.dtype)

    def _require_head(self) -> None:
        if not self.config.masked_head:
            raise ValueError(
                "this encoder has no masked-token head (masked_head=False): it gives hidden states, and pool() gives "
                "one vector a text"
            )
