"""Learned embeddings (GPT-2, BERT): one vector a position, and none beyond the last."""

from __future__ import annotations

from torch import Tensor, nn

from trainshort.positions.position import Position, Shape


class Learned(Position):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if shape.max_length is None:
            raise ValueError("learned positions need max_length: the number of positions to learn")
        self.max_length = shape.max_length
        self.embedding = nn.Embedding(shape.max_length, shape.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.embedding(positions).to(x.dtype)
