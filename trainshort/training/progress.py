"""A bar with step, loss, tokens a second and time left; in a log file it is a line now and then.

The speed is that of the last seconds, not since the start: what slows a run down shows at once.
"""

from __future__ import annotations

import sys
import time
from typing import Self

from trainshort.common.progress import Lines, Pace, StepBars

RECENT = 10.0  # seconds that the speed is taken over


class TrainProgress(StepBars):
    def __init__(self, title: str, *, steps: int, start: int, tokens_a_step: int, show: bool) -> None:
        super().__init__(show=show)
        self.title, self.steps, self.start, self.tokens_a_step = title, steps, start, tokens_a_step
        self.lines, self.pace = Lines(), Pace(start, time.monotonic(), recent=RECENT)

    def __enter__(self) -> Self:
        super().__enter__()
        self.set_bar(self.title, self.start, self.steps)
        return self

    def update(self, step: int, loss: float) -> None:
        if not self.show:
            return
        figures = self.figures(step, loss, self.pace.add(step, time.monotonic()) or 0.0)
        if self.shown:
            self.set_bar(self.title, step, self.steps, figures)
        elif self.lines.due() or step == self.steps:
            print(f"{self.title}: step {step} of {self.steps}, {figures}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        if self.shown:
            self.say(text)
        elif self.show:
            print(text, file=sys.stderr)

    def figures(self, step: int, loss: float, pace: float) -> str:
        left = int(pace * (self.steps - step))
        hours, minutes = divmod(left // 60, 60)
        clock = f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes}:{left % 60:02}"
        return f"loss {loss:.4f}, {self.tokens_a_step / max(pace, 1e-9):,.0f} tokens/s, {clock} left"
