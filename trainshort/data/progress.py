"""Signs of life: a bar on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MEGABYTE = 1e6
LINE_EVERY = 15.0  # seconds, where there is no terminal


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


def time_left(seconds: float) -> str:
    """`about 4 min left`, as exactly as such guesses are."""
    if seconds < 90:
        return f"about {max(1, round(seconds / 5) * 5)} s left"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min left"
    return f"about {seconds / 3600:.1f} h left"


@contextmanager
def byte_bar(title: str, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Bytes with speed and time left; yields what is to be called with the bytes done so far."""
    if not show:
        yield lambda done: None
        return
    if not sys.stderr.isatty():
        yield _byte_lines(title, total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total or None)
        yield lambda done: bar.update(task, completed=done)


def _byte_lines(title: str, total: int) -> Callable[[int], None]:
    lines, began = Lines(), time.monotonic()

    def advance(done: int) -> None:
        if lines.due():
            left = (time.monotonic() - began) / max(1, done) * (total - done)
            of = f" of {total / MEGABYTE:,.1f} MB, {time_left(left)}" if total > done else " MB"
            print(f"{title}: {done / MEGABYTE:,.1f}{of}", file=sys.stderr, flush=True)

    return advance
