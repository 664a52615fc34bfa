"""logs/rank-N.log: what each of several processes did, in the run folder.

What ranks other than 0 and the libraries under them would print goes there too, so that a terminal shows one process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from trainshort.training.processes import Processes


class RankLog:
    """Lines with the time. Without a file they go nowhere: a process alone has no log."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = file

    def line(self, text: str) -> None:
        if self.file is None:
            return
        with contextlib.suppress(OSError):  # a full disk is told where it matters
            self.file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self.file.flush()


@contextlib.contextmanager
def rank_log(folder: Path, processes: Processes) -> Iterator[RankLog]:
    """The log of this process, while the context is open; errors that leave it are in it, with their tracebacks."""
    if processes.kind is None:
        yield RankLog()
        return
    path = folder / "logs" / f"rank-{processes.rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        log = RankLog(file)
        about = f"{os.uname().nodename}, process {os.getpid()}, {processes.device}"
        log.line(f"rank {processes.rank} of {processes.world} on {about}, {processes.kind}")
        try:
            with contextlib.nullcontext() if processes.is_first else _output_to(file):
                yield log
        except KeyboardInterrupt as stop:
            log.line(str(stop) or "stopped")
            raise
        except BaseException as error:
            log.line("".join(traceback.format_exception(error)).rstrip())
            raise
        log.line("done")


@contextlib.contextmanager
def _output_to(file: IO[str]) -> Iterator[None]:
    """stdout and stderr of this process, and of the libraries in it, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = {number: os.dup(number) for number in (1, 2)}
    try:
        for number in before:
            os.dup2(file.fileno(), number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in before.items():
            os.dup2(copy, number)
            os.close(copy)
