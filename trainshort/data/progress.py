"""How far a text is read, in bytes: a bar on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainshort.common.progress import Lines, can_draw_bars, time_left

MEGABYTE = 1e6


@contextmanager
def byte_bar(title: str, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Bytes with speed and time left; yields what is to be called with the bytes done so far."""
    if not show:
        yield lambda done: None
        return
    if not can_draw_bars():
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
