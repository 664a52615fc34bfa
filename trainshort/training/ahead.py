"""The batches of the next steps, made by a thread and copied to the device while earlier steps are computed.

Which tokens a step sees stays a function of the step alone, so nothing here changes a number.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import torch

from trainshort.training.batches import Batch

AHEAD = 2  # steps


class _Made(NamedTuple):
    parts: list[Batch]
    copied: torch.cuda.Event | None = None
    error: Exception | None = None


class BatchesAhead:
    """The parts of the batches of steps first, first + 1, ... up to last, in order.

    make: the parts of a step, on the CPU. What it raises is raised by `next`.
    """

    def __init__(self, make: Callable[[int], list[Batch]], device: torch.device, *, first: int, last: int) -> None:
        self.make, self.device, self.steps = make, device, range(first, last + 1)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.made: queue.Queue[_Made] = queue.Queue(AHEAD)
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="batches ahead", daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed.set()
        while self.thread.is_alive():  # it may wait for room
            with contextlib.suppress(queue.Empty):
                self.made.get_nowait()
            self.thread.join(0.01)

    def next(self) -> list[Batch]:
        """The parts of the next step, on the device."""
        made = self.made.get()
        if made.error is not None:
            raise made.error
        if made.copied is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(made.copied)
            for part in made.parts:
                part.record_stream(now)
        return made.parts

    def _run(self) -> None:
        for step in self.steps:
            try:
                made = self._make(step)
            except Exception as error:
                made = _Made([], error=error)
            self.made.put(made)
            if made.error is not None or self.closed.is_set():
                return

    def _make(self, step: int) -> _Made:
        parts = self.make(step)
        if self.stream is None:
            return _Made([part.to(self.device) for part in parts])
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            return _Made([part.to(self.device) for part in parts], self.stream.record_event())
