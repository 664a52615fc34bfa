"""The cores of the machine, and how busy others keep them while something is timed: a speed that was measured on a
loaded machine says so.

The system counts how long each thread was ready to run and had to wait for a core. The share of that in all the time
its threads ran or waited is near 0 on an idle machine, whatever the work; with a busy neighbour on each core, a half.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LOADED = 0.1  # waiting longer than this share of the time, what was timed is no figure of the machine
TASKS = Path("/proc/self/task")


class Waiting:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._before = _ran_and_waited()

    def share(self) -> float | None:
        """Of the time that the threads of this process ran or waited, the part that they waited; None if unknown."""
        now = _ran_and_waited()
        if now is None or self._before is None:
            return _from_load_average()
        ran, waited = (max(0, after - before) for after, before in zip(now, self._before, strict=True))
        return round(waited / (ran + waited), 3) if ran + waited else 0.0


def is_loaded(share: float | None) -> bool:
    """Whether a figure with this share of waiting says little of the machine."""
    return share is not None and share > LOADED


def in_words(share: float | None) -> str:
    """`, on a loaded machine ...` for a figure that was measured on one; nothing for others."""
    if share is None or not is_loaded(share):
        return ""
    return f", on a loaded machine: its threads waited for a core {share:.0%} of the time"


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ran_and_waited() -> tuple[int, int] | None:
    """Nanoseconds of all threads, where the system says them: on Linux."""
    ran = waited = found = 0
    with contextlib.suppress(OSError):
        for task in TASKS.iterdir():
            with contextlib.suppress(OSError, ValueError):  # a thread that has just ended
                one, other = (task / "schedstat").read_text().split()[:2]
                ran, waited, found = ran + int(one), waited + int(other), found + 1
    return (ran, waited) if found and ran else None


def _from_load_average() -> float | None:
    """More that is ready to run than there are cores: what is too much waits."""
    if not hasattr(os, "getloadavg"):
        return None
    load = os.getloadavg()[0]
    return round(max(0.0, 1 - cores() / load), 3) if load else 0.0
