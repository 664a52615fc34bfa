"""How far something is and how long it still takes: bars on a terminal, and elsewhere a line now and then.

Bars are drawn by the package rich. Where it is not installed, a terminal gets the lines.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from trainshort.common.extras import is_installed

LINE_EVERY = 15.0  # seconds, where there is no terminal


def can_draw_bars() -> bool:
    """Whether stderr is a terminal and rich is installed."""
    return sys.stderr.isatty() and is_installed("rich")


class Lines:
    """Says whether it is time for another line. The first comes after a while: what is quick needs none."""

    def __init__(self, every: float = LINE_EVERY) -> None:
        self.every, self.last = every, time.monotonic()

    def due(self) -> bool:
        now = time.monotonic()
        if now - self.last < self.every:
            return False
        self.last = now
        return True


class Pace:
    """Seconds a unit of work: over the last `recent` seconds, or over the last addition where that took longer."""

    def __init__(self, done: float, now: float, *, recent: float) -> None:
        self.recent, self.seen = recent, deque([(now, done)])

    def add(self, done: float, now: float) -> float | None:
        """`done` is all that is done by now, in the same units as at the start."""
        self.seen.append((now, done))
        while len(self.seen) > 2 and now - self.seen[1][0] >= self.recent:
            self.seen.popleft()
        return self.seconds

    @property
    def seconds(self) -> float | None:
        """None where nothing was done."""
        (then, before), (now, done) = self.seen[0], self.seen[-1]
        return (now - then) / (done - before) if done > before else None


class StepBars:
    """Bars of one or several runs that are counted in steps, each with figures beside it.

    They are there while this is open, if bars can be drawn: otherwise `shown` is False, and nothing is shown.
    """

    def __init__(self, *, show: bool, width: int = 40) -> None:
        self.show, self.width = show, width
        self.progress: Any = None  # of the package rich
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if self.show and can_draw_bars():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=self.width), MofNCompleteColumn())
            self.progress = Progress(*columns, TextColumn("{task.fields[figures]}"), console=Console(stderr=True))
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()

    @property
    def shown(self) -> bool:
        return self.progress is not None

    def set_bar(self, title: str, step: int, steps: int, figures: str = "") -> None:
        """Show that `step` of so many steps are done, with a new bar if the title is new."""
        if self.progress is None:
            return
        if title not in self._tasks:
            self._tasks[title] = self.progress.add_task(title, total=steps, figures="")
        self.progress.update(self._tasks[title], completed=step, figures=figures)

    def remove_bar(self, title: str) -> None:
        if title in self._tasks:
            self.progress.remove_task(self._tasks.pop(title))

    def say(self, text: str) -> None:
        """Write a line above the bars."""
        self.progress.console.print(text, highlight=False)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """A sign of life, on a terminal alone, while something takes its time."""
    if not can_draw_bars():
        if sys.stderr.isatty():
            print(f"{what} ...", file=sys.stderr, flush=True)
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn(what), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def time_left(seconds: float) -> str:
    """`about 4 min left`, as exactly as such guesses are."""
    if seconds < 90:
        return f"about {max(1, round(seconds / 5) * 5)} s left"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min left"
    return f"about {seconds / 3600:.1f} h left"
