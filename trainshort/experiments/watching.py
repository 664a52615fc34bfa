"""What a comparison shows of itself: which run of how many, how far it is, and about how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from trainshort.common.progress import Lines, Pace, StepBars, time_left
from trainshort.evaluation.evaluate import Progress
from trainshort.evaluation.progress import evaluation_progress
from trainshort.training.config import TrainConfig

RECENT = 60.0  # seconds that the time left is guessed from


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Watcher:
    """Told what happens: by default it is shown on stderr."""

    say: Callable[[str], None] = to_stderr
    testing: Callable[[int], AbstractContextManager[Progress | None]] = evaluation_progress
    progress: bool = True  # show the bars of preparing and training


QUIET = Watcher(say=lambda text: None, testing=lambda lengths: nullcontext(None), progress=False)


@dataclass(frozen=True)
class Planned:
    """One run of a comparison: its number, of how many, and how it is trained."""

    number: int
    total: int
    training: TrainConfig

    @property
    def title(self) -> str:
        config = self.training
        method = config.name or config.position
        return f"run {self.number} of {self.total}, {method} at {config.length:,}, seed {config.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.training.out)


class Remaining:
    """Guesses the time that the rest takes from the time that the last part took; in any unit of work."""

    def __init__(self, work: float) -> None:
        self.left, self.done = work, 0.0
        self.pace = Pace(0.0, time.monotonic(), recent=RECENT)

    def add(self, work: float) -> None:
        self.left, self.done = max(0.0, self.left - work), self.done + work
        self.pace.add(self.done, time.monotonic())

    def skip(self, work: float) -> None:
        """Work that was done before; and what came before any is no sign of how long the rest takes."""
        self.left = max(0.0, self.left - work)
        if not self.done:
            self.pace = Pace(0.0, time.monotonic(), recent=RECENT)

    def __str__(self) -> str:
        """`, about 4 min left`, or nothing where nobody can know or nothing is left."""
        seconds = self.pace.seconds
        return "" if seconds is None or not self.left else f", {time_left(seconds * self.left)}"


class Board(StepBars):
    """Several runs that are trained at once: a bar each on a terminal, elsewhere a line each now and then."""

    def __init__(self, runs: Sequence[Planned], watcher: Watcher) -> None:
        super().__init__(show=watcher.progress, width=20)
        self.watcher = watcher
        self.steps = {run.number: 0 for run in runs}
        self.remaining = Remaining(sum(run.training.steps * run.training.batch_tokens for run in runs))
        self.lines: dict[int, Lines] = {}

    def say(self, text: str) -> None:
        if self.shown:
            super().say(text)
        else:
            self.watcher.say(text)

    def step(self, run: Planned, step: int, loss: float, resumed: bool) -> None:
        """A run has taken a step; resumed: it has begun there, after an interruption."""
        work = (step - self.steps[run.number]) * run.training.batch_tokens
        self.steps[run.number] = step
        if resumed:
            self.remaining.skip(work)
            return
        self.remaining.add(work)
        figures = f"loss {loss:.4f}{self.remaining}"
        if self.shown:
            self.set_bar(run.title, step, run.training.steps, figures)
        elif self.lines.setdefault(run.number, Lines()).due():
            self.watcher.say(f"{run.title}: step {step} of {run.training.steps}, {figures} in all")

    def finished(self, run: Planned) -> None:
        self.remaining.add((run.training.steps - self.steps[run.number]) * run.training.batch_tokens)
        self.steps[run.number] = run.training.steps
        self.say(f"{run.title}: trained{self.remaining}")
        self.remove_bar(run.title)
