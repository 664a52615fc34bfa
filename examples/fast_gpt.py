"""A plain GPT with ALiBi, made fast by two changed lines: an import and the attention call.

The plain model adds its biases as textbooks do, by a tensor of heads x length x length. With the changed lines it has
the same loss and the same gradients without that tensor, and never visits keys that can't matter.

    python examples/fast_gpt.py            half a minute on two cores
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainshort as ts  # changed: this line is new


def alibi_mask(heads: int, length: int) -> Tensor:
    """The biases of all pairs, [H, T, T]: -slope * distance in the past, -inf in the future."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))
    return (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, fast: bool) -> None:
        super().__init__()
        self.heads, self.fast = heads, fast
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.ffn = nn.Sequential(nn.LayerNorm(width), *wide)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        if self.fast:
            y = ts.alibi_attention(q, k, v)  # changed: it was the line after the next
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=alibi_mask(self.heads, x.shape[1]))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.ffn(x)


def gpt(fast: bool, width: int = 256, heads: int = 4, layers: int = 2) -> nn.Module:
    """Without position embeddings: the biases are all that says where a token stands."""
    torch.manual_seed(0)
    blocks = [Block(width, heads, fast) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(256, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 256))


def step(model: nn.Module, tokens: Tensor) -> tuple[float, Tensor, float]:
    """Loss, all gradients, and the seconds of a training step."""
    start = time.perf_counter()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    seconds = time.perf_counter() - start
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients]), seconds


def main(lengths: list[int]) -> None:
    print("A training step of a plain GPT, and of the same GPT with two lines changed.")
    print(f"{'length':>8}{'loss':>10}{'changed':>10}{'gradients differ by':>22}{'seconds':>10}{'changed':>10}")
    step(gpt(fast=True), torch.randint(256, (1, 256)))  # a warm-up
    for length in lengths:
        tokens = torch.randint(256, (1, length + 1), generator=torch.Generator().manual_seed(0))
        loss, gradient, plain = step(gpt(fast=False), tokens)
        same, other, fast = step(gpt(fast=True), tokens)
        off = float((gradient - other).norm() / gradient.norm())
        print(f"{length:8,}{loss:10.5f}{same:10.5f}{off:22.1e}{plain:10.2f}{fast:10.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    main(parser.parse_args().lengths)
