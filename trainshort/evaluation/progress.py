"""How far an evaluation is: a bar for each length on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainshort.common.progress import Lines, can_draw_bars


@contextmanager
def evaluation_progress(lengths: int) -> Iterator[Callable[[int, int, int], None]]:
    """Yields what is to be told of each length, the tokens newly scored at it, and how many there will be."""
    if not can_draw_bars():
        yield _lines(lengths)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        tasks: dict[int, Any] = {}

        def on_scored(length: int, tokens: int, total: int) -> None:
            if length not in tasks:
                tasks[length] = progress.add_task(f"length {length:,} ({len(tasks) + 1} of {lengths})", total=total)
            progress.update(tasks[length], advance=tokens)

        yield on_scored


def _lines(lengths: int) -> Callable[[int, int, int], None]:
    lines, scored = Lines(), dict[int, int]()

    def on_scored(length: int, tokens: int, total: int) -> None:
        scored[length] = scored.get(length, 0) + tokens
        if lines.due():
            which = f"length {length:,} ({len(scored)} of {lengths})"
            print(f"{which}: {scored[length]:,} of {total:,} tokens scored", file=sys.stderr, flush=True)

    return on_scored
