"""A bar with step, loss, tokens a second and time left; in a log file it is a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

LINE_EVERY = 15.0  # seconds, where there is no terminal


class TrainProgress:
    def __init__(self, title: str, *, steps: int, start: int, tokens_a_step: int, show: bool) -> None:
        self.title, self.steps, self.start, self.tokens_a_step, self.show = title, steps, start, tokens_a_step, show
        self.began = self.last_line = time.monotonic()
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
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(self.task, completed=step, figures=self.figures(step, loss, now))
        elif now - self.last_line >= LINE_EVERY or step == self.steps:
            self.last_line = now
            print(f"{self.title}: step {step} of {self.steps}, {self.figures(step, loss, now)}", file=sys.stderr)

    def note(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text)
        elif self.show:
            print(text, file=sys.stderr)

    def figures(self, step: int, loss: float, now: float) -> str:
        pace = (now - self.began) / max(1, step - self.start)  # seconds a step
        left = int(pace * (self.steps - step))
        hours, minutes = divmod(left // 60, 60)
        clock = f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes}:{left % 60:02}"
        return f"loss {loss:.4f}, {self.tokens_a_step / max(pace, 1e-9):,.0f} tokens/s, {clock} left"
