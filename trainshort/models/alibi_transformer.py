"""ALiBiTransformer: the names, fields and defaults that users of jaketae/alibi know, on this library's layers.

A stack of blocks over embeddings, [B, T, d_model] in and out. Any length works, `max_len` is only remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainshort.common.checks import is_size
from trainshort.models.config import ModelConfig
from trainshort.models.layers import Block, Context
from trainshort.models.model import materialize_tables
from trainshort.positions import build_position


@dataclass(frozen=True)
class ALiBiConfig:
    """The fields and defaults that jaketae/alibi gave its users.

    Args:
        num_layers: Blocks.
        d_model: Channels.
        num_heads: Heads.
        max_len: Remembered and nothing else: any length works.
        dropout: Of what attention and feed-forward add, in training.
        causal: False: attention to both sides.
        expansion_factor: Width of the feed-forward layer, in d_model.

    Example:
        >>> ts.ALiBiConfig(num_layers=2).d_model
        256
    """

    num_layers: int = 6
    d_model: int = 256
    num_heads: int = 8
    max_len: int = 256
    dropout: float = 0.1
    causal: bool = True
    expansion_factor: int = 1

    def __post_init__(self) -> None:
        for name in ("max_len", "expansion_factor"):  # ModelConfig checks the fields it has, when the model is built
            if not is_size(value := getattr(self, name)):
                raise ValueError(f"{name} must be a positive int, got {value!r}")


class ALiBiTransformer(nn.Module):
    """A stack of blocks over embeddings, by the name and with the config that users of jaketae/alibi know.

    Args:
        config: An ALiBiConfig.

    Example:
        >>> ts.ALiBiTransformer(ts.ALiBiConfig(num_layers=2))(torch.randn(1, 100, 256)).shape
        torch.Size([1, 100, 256])
    """

    def __init__(self, config: ALiBiConfig) -> None:
        super().__init__()
        self.config = config
        shape = ModelConfig(
            num_layers=config.num_layers,
            d_model=config.d_model,
            num_heads=config.num_heads,
            d_ff=config.d_model * config.expansion_factor,
            dropout=config.dropout,
            causal=config.causal,
            ffn_bias=True,
            ffn_out_bias=True,
        )
        self.position = build_position(shape.position, shape.position_shape, shape.position_options)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(config.num_layers))
        self.register_load_state_dict_post_hook(materialize_tables)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Run the blocks.

        Args:
            x: [B, T, d_model].
            key_padding_mask: bool [B, T], True for real positions.

        Returns:
            [B, T, d_model].
        """
        if x.dim() != 3 or x.shape[-1] != self.config.d_model:
            raise ValueError(
                f"x must be [batch, length, {self.config.d_model}], as d_model is {self.config.d_model}; "
                f"got {list(x.shape)}"
            )
        positions = torch.arange(x.shape[1], device=x.device)[None]
        context = Context(self.position, positions, self.position.bias(), key_padding_mask=key_padding_mask)
        for layer in self.layers:
            x = layer(x, context)
        return x
