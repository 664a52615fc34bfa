"""What benchmarks/models_gpu.py compares with: a plain GPT with FlexAttention's ALiBi, and transformers' BLOOM."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import trainshort as ts


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, slopes: Tensor, mask: BlockMask) -> Tensor:
        def penalty(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - slopes[h] * (i - j)

        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = flex_attention(q, k, v, score_mod=penalty, block_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """What a good engineer writes in forty lines; the whole of it is compiled."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("slopes", ts.alibi_slopes(heads), persistent=False)

    def loss(self, tokens: Tensor, targets: Tensor, mask: BlockMask) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.slopes, mask)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def copy_from(self, other: ts.LanguageModel) -> None:
        """Take the weights of one of our models."""
        self.embedding.load_state_dict(other.trunk.embedding.state_dict())
        for mine, theirs in zip(self.blocks, other.trunk.blocks, strict=True):
            pairs = (
                (mine.norm1, theirs.attention_norm),
                (mine.qkv, theirs.attention.qkv),
                (mine.out, theirs.attention.out),
                (mine.norm2, theirs.ffn_norm),
                (mine.up, theirs.ffn.up),
                (mine.down, theirs.ffn.down),
            )
            for to, source in pairs:
                to.load_state_dict(source.state_dict())
        self.norm.load_state_dict(other.trunk.final_norm.state_dict())


def plain_gpt(ours: ts.LanguageModel, length: int) -> tuple[nn.Module, Any]:
    """The same model in plain code, and its compiled loss of tokens and targets."""
    config = ours.config
    model = PlainGPT(config.num_layers, config.d_model, config.num_heads, config.vocab_size).cuda()
    model.copy_from(ours)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
    compiled = torch.compile(model.loss)
    return model, lambda tokens, targets: compiled(tokens, targets, mask)


def bloom(shape: dict[str, int]) -> Any:
    """transformers' own BLOOM with random weights, bfloat16."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["d_model"],
        n_layer=shape["num_layers"],
        n_head=shape["num_heads"],
    )
    return BloomForCausalLM(config).to("cuda", torch.bfloat16).eval()
