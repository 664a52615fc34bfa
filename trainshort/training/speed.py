"""How fast training is now, in tokens a second and as a share of what the machine's matrix products reach (MFU).

Compiling, validation and checkpoints are left out: what counts is the time between steps.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from trainshort.common.progress import Pace
from trainshort.models import LanguageModel

RECENT = 10.0  # seconds that the speed is taken over
SIZE = 8192  # of the matrices whose product is timed
WARM_UP = 0.5  # seconds of products before: a GPU that has rested is faster than it stays


def operations_per_token(model: LanguageModel, length: int) -> int:
    """Of training on rows of `length` tokens: forward, and twice as many backward.

    Each parameter of a matrix is one multiplication and one addition; embeddings are looked up, unless the head is
    the same matrix. Dense causal attention compares a token with length / 2 others on average, for scores and again
    for values: that it visits fewer here counts as speed.
    """
    config = model.config
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)} - {model.head.weight}
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter not in tables)
    attention = 2 * config.num_layers * length * config.num_heads * config.width
    return 3 * (2 * parameters + attention)


def matrix_rate(device: torch.device, size: int = SIZE, repeats: int = 10) -> float | None:
    """Operations a second of a bfloat16 product, as a GPU keeps it up; None elsewhere."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        random = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
        one, two = (torch.randn(size, size, dtype=torch.bfloat16, device=device, generator=random) for _ in range(2))
        out = torch.empty_like(one)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.monotonic()
        while True:
            start.record()
            for _ in range(repeats):
                torch.mm(one, two, out=out)
            end.record()
            end.synchronize()
            if time.monotonic() - began > WARM_UP:
                return 2 * size**3 * repeats / (start.elapsed_time(end) / 1000)


class Speed:
    """operations: per token; rate: operations a second of the machine, None where there is no telling."""

    def __init__(self, tokens_a_step: int, operations: int, rate: float | None) -> None:
        self.tokens_a_step, self.operations, self.rate = tokens_a_step, operations, rate
        self.tokens_per_second: float | None = None
        self.pace: Pace | None = None

    def begin(self, step: int) -> None:
        """Count from here: `step` is done, and so is what came after it and is no training."""
        self.pace = Pace(step, time.monotonic(), recent=RECENT)

    def add(self, step: int) -> None:
        if self.pace is not None and (seconds := self.pace.add(step, time.monotonic())):
            self.tokens_per_second = self.tokens_a_step / seconds

    @property
    def mfu(self) -> float | None:
        if self.rate is None or self.tokens_per_second is None:
            return None
        return self.tokens_per_second * self.operations / self.rate
