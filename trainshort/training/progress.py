"""A bar with step, loss, speed and time left; in a log file it is a line now and then.

The speed is that of the last seconds of training, not since the start; the time left is found from all that the last
seconds were spent on.
"""

from __future__ import annotations

import sys
import time
from typing import Self

from trainshort.common.progress import Lines, Pace, StepBars
from trainshort.training.speed import RECENT, Speed


class TrainProgress(StepBars):
    def __init__(self, title: str, *, steps: int, start: int, show: bool) -> None:
        super().__init__(show=show)
        self.title, self.steps, self.start = title, steps, start
        self.lines = Lines()
        self.pace: Pace | None = None  # from the first line on: what came before it was compiled, too

    def __enter__(self) -> Self:
        super().__enter__()
        self.set_bar(self.title, self.start, self.steps)
        return self

    def update(self, step: int, loss: float, speed: Speed, keys_kept: float | None = None) -> None:
        """keys_kept: the share of keys that certified windows keep, as far as it is known."""
        if not self.show:
            return
        self.pace = self.pace or Pace(step, time.monotonic(), recent=RECENT)
        pace = self.pace.add(step, time.monotonic())
        figures = [f"loss {loss:.4f}", *_of_speed(speed), *_of_keys(keys_kept)]
        if pace is not None or step == self.steps:
            figures.append(self.time_left(step, pace or 0.0))
        text = ", ".join(figures)
        if self.shown:
            self.set_bar(self.title, step, self.steps, text)
        elif self.lines.due() or step == self.steps:
            print(f"{self.title}: step {step} of {self.steps}, {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        if self.shown:
            self.say(text)
        elif self.show:
            print(text, file=sys.stderr)

    def time_left(self, step: int, pace: float) -> str:
        left = int(pace * (self.steps - step))
        hours, minutes = divmod(left // 60, 60)
        clock = f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes}:{left % 60:02}"
        return f"{clock} left"


def _of_speed(speed: Speed) -> list[str]:
    if speed.tokens_per_second is None:
        return []
    share = "" if speed.mfu is None else f" ({speed.mfu:.0%} of the matrix rate)"
    return [f"{speed.tokens_per_second:,.0f} tokens/s{share}"]


def _of_keys(keys_kept: float | None) -> list[str]:
    return [] if keys_kept is None else [f"{keys_kept:.0%} of keys"]
