"""T5's relative bias (Raffel et al. 2020): a learned number for each head and bucket of distances."""

from __future__ import annotations

import torch
from torch import nn

from trainshort.ops.bias import Bias, BucketBias
from trainshort.positions.position import Position, Shape


class T5(Position):
    """One table, shared by all layers."""

    def __init__(self, shape: Shape, *, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.distance, self.bidirectional = max_distance, not shape.causal
        self.table = nn.Parameter(torch.zeros(buckets, shape.num_heads))
        self.bias()  # refuses impossible numbers now rather than at the first batch
        nn.init.normal_(self.table, std=0.02)

    def bias(self) -> Bias | None:
        return BucketBias(self.table, max_distance=self.distance, bidirectional=self.bidirectional)
