"""Progress bars on the terminal, and none where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MEGABYTE = 1e6


@contextmanager
def byte_bar(title: str, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar of bytes with speed and time left; yields what is to be called with the bytes done so far."""
    if not show or not sys.stderr.isatty():
        yield lambda done: None
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
