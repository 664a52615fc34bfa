"""Loss and gradient norm of every step: read from the device, checked, and written, without making a GPU wait.

On a GPU the numbers of a step are read after the next one was launched, so that it always has work. `flush` reads
those that are still on their way: it is called before anything is saved, so nothing that is not finite ever is.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainshort.training.config import TrainConfig
from trainshort.training.metrics import Metrics, NoMetrics
from trainshort.training.progress import TrainProgress
from trainshort.training.speed import Speed

OnStep = Callable[[int, float | None], None]


class _Reading(NamedTuple):
    """Numbers of a step on their way from the device."""

    step: int
    lr: float
    numbers: Tensor  # loss and gradient norm, on the CPU: whole once they are copied
    copied: torch.cuda.Event | None


class StepLog:
    """failed: makes an error of a step, its loss and its gradient norm, one of which is not finite."""

    def __init__(
        self,
        config: TrainConfig,
        metrics: Metrics | NoMetrics,
        bar: TrainProgress,
        speed: Speed,
        *,
        began: float,
        on_step: OnStep | None,
        failed: Callable[[int, float, float], Exception],
    ) -> None:
        self.config, self.metrics, self.bar, self.speed = config, metrics, bar, speed
        self.began, self.on_step, self.failed = began, on_step, failed
        self.reading: deque[_Reading] = deque()
        self.keys_kept: float | None = None

    def add(self, step: int, lr: float, loss: Tensor, norm: Tensor) -> None:
        numbers, copied = torch.stack((loss, norm.to(loss.dtype))), None
        if numbers.is_cuda:
            host = torch.empty_like(numbers, device="cpu", pin_memory=True)
            numbers, copied = host.copy_(numbers, non_blocking=True), torch.cuda.Event()
            copied.record(torch.cuda.current_stream(loss.device))
        self.reading.append(_Reading(step, lr, numbers, copied))
        self._write(leave=0 if copied is None else 1)

    def flush(self) -> None:
        """Wait for what is still on its way, and write it."""
        self._write(leave=0)

    def add_row(self, step: int, values: dict[str, Any]) -> None:
        """A line of metrics.jsonl, with the tokens that were seen by then and the time."""
        seconds = round(time.monotonic() - self.began, 3)
        self.metrics.add({"step": step, **values, "tokens": step * self.config.batch_tokens, "seconds": seconds})

    def _write(self, leave: int) -> None:
        while len(self.reading) > leave:
            step, lr, numbers, copied = self.reading.popleft()
            if copied is not None:
                copied.synchronize()
            loss, norm = numbers.tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.reading.clear()
                raise self.failed(step, loss, norm)
            if step % self.config.log_every == 0 or step == self.config.steps:
                self._write_step(step, lr, loss, norm)

    def _write_step(self, step: int, lr: float, loss: float, norm: float) -> None:
        self.speed.add(step)
        row = {"loss": loss, "lr": lr, "gradient_norm": norm}
        if (mfu := self.speed.mfu) is not None:
            row["mfu"] = float(f"{mfu:.4g}")
        self.add_row(step, row)
        self.bar.update(step, loss, self.speed, self.keys_kept)
        if self.on_step is not None:
            self.on_step(step, loss)
