"""A bar with step, loss, tokens a second and time left; in a log file it is a line now and then.

The speed is that of the last seconds, not since the start: what slows a run down shows at once.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Any

from trainshort.data.progress import Lines

RECENT = 10.0  # seconds that the speed is taken over


class Pace:
    """Seconds a step over the last seconds, or over the last step where that took longer."""

    def __init__(self, step: int, now: float) -> None:
        self.seen = deque([(now, step)])

    def add(self, step: int, now: float) -> float:
        self.seen.append((now, step))
        while len(self.seen) > 2 and now - self.seen[1][0] >= RECENT:
            self.seen.popleft()
        then, before = self.seen[0]
        return (now - then) / max(1, step - before)


class TrainProgress:
    def __init__(self, title: str, *, steps: int, start: int, tokens_a_step: int, show: bool) -> None:
        self.title, self.steps, self.start, self.tokens_a_step, self.show = title, steps, start, tokens_a_step, show
        self.lines, self.pace = Lines(), Pace(start, time.monotonic())
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> TrainProgress:
        if self.show and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
            )
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.steps, completed=self.start, figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, step: int, loss: float) -> None:
        if not self.show:
            return
        figures = self.figures(step, loss, self.pace.add(step, time.monotonic()))
        if self.bar is not None:
            self.bar.update(self.task, completed=step, figures=figures)
        elif self.lines.due() or step == self.steps:
            print(f"{self.title}: step {step} of {self.steps}, {figures}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text)
        elif self.show:
            print(text, file=sys.stderr)

    def figures(self, step: int, loss: float, pace: float) -> str:
        left = int(pace * (self.steps - step))
        hours, minutes = divmod(left // 60, 60)
        clock = f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes}:{left % 60:02}"
        return f"loss {loss:.4f}, {self.tokens_a_step / max(pace, 1e-9):,.0f} tokens/s, {clock} left"
