"""Ctrl-C and SIGTERM: whatever a command is at, it says what is done and how to go on.

SIGTERM raises where the program is, like Ctrl-C. Work inside a library (a tokenizer being trained) may keep Python
from noticing for minutes, and who sends SIGTERM seldom waits that long: a thread then says it and ends the process.
Nothing is lost by that, since files are put into place whole. Training notices both by itself, after the step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from trainshort.cli.errors import INTERRUPTED
from trainshort.training.launch import ends_at_once, rank

GRACE = 5.0  # seconds that Python has to notice
END = bytes(1)  # no signal has this number
STATUS = 128 + signal.SIGTERM  # what shells expect of a program that a signal ended

_told: list[Callable[[], str]] = []  # what is to be said at this moment, the innermost last


class Terminated(KeyboardInterrupt):
    """SIGTERM: what there is to say about it is the same as after Ctrl-C."""

    status = STATUS


class Stopped(KeyboardInterrupt):
    """With what is done and how to go on."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@contextlib.contextmanager
def on_stop(tell: Callable[[], str]) -> Iterator[None]:
    """If this is stopped, say what is done and how to go on, unless who stopped has said it."""
    _told.append(tell)
    try:
        yield
    except KeyboardInterrupt as stop:
        if str(stop):
            raise
        raise Stopped(tell(), int(getattr(stop, "status", INTERRUPTED))) from None
    finally:
        _told.pop()


@contextlib.contextmanager
def ending_undisturbed() -> Iterator[None]:
    """torchrun ends all of its processes when it sees one end: what ended this one is to be said before that."""
    try:
        yield
    except BaseException:
        if ends_at_once():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        raise


@contextlib.contextmanager
def terminable(name: str) -> Iterator[None]:
    """While this is open, SIGTERM raises Terminated. name: of the command, for what is said about it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noticed = threading.Event()

    def stop(number: int, frame: object) -> None:
        noticed.set()
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # written to by the system, not by Python
    watch = threading.Thread(target=_watch, args=(reading, stop, noticed, name), daemon=True)
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        if signal.getsignal(signal.SIGTERM) is stop:  # who wants it otherwise from now on, has said so
            signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(BlockingIOError):
            os.write(writing, END)
        os.close(writing)  # would be enough, if no forked process had a copy of it
        watch.join()


def _watch(reading: int, stop: object, noticed: threading.Event, name: str) -> None:
    with open(reading, "rb", buffering=0) as signals:
        while (number := signals.read(1)) not in (b"", END):
            mine = number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is stop
            if mine and not noticed.wait(GRACE):
                text = _told[-1]() if _told else "stopped"
                if rank() == 0:
                    print(f"\n{name}: {text}", file=sys.stderr, flush=True)
                os._exit(STATUS)
