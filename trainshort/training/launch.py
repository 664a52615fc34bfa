"""What torchrun tells the processes that it starts, read from the environment, and how they end.

Light: needs no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

_ends_at_once = False


class EndedByOthersError(RuntimeError):
    """Another process of the run failed first, and has said why."""


def is_launched() -> bool:
    """Whether this process is one of those that torchrun (or whatever sets the same variables) has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return _number("RANK", 0) if is_launched() else 0


def local_rank() -> int:
    """Among the processes of this machine."""
    return _number("LOCAL_RANK", rank()) if is_launched() else 0


def number_of_processes() -> int:
    return _number("WORLD_SIZE", 1) if is_launched() else 1


def restarts() -> int:
    """How often torchrun --max-restarts has started the processes again after a failure."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def lasting_store() -> tuple[str, int] | None:
    """Host and port of torchrun's own store, which outlives the processes; None where it starts none again."""
    if _number("TORCHELASTIC_MAX_RESTARTS", 0) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0)
    return None


def run_and_end(command: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with its exit status, whatever happens.

    What gloo and NCCL leave running (threads, among others) can make the end of the interpreter hang or abort, and
    torchrun would wait for this process, or count it as failed. All work is done by then.
    """
    global _ends_at_once
    status = 1
    try:
        _ends_at_once = True
        status = command()
    except BaseException:  # with --debug
        traceback.print_exc()
    finally:
        try:
            for last in (atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
                with contextlib.suppress(BaseException):  # nobody reads it any more, for one
                    last()
        finally:
            os._exit(status)


def ends_at_once() -> bool:
    """Whether this process ends with its command. A process group then ends with it: to end it before would wait for
    exchanges that other processes have not joined."""
    return _ends_at_once


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment says {name}={text!r}, which torchrun sets to a whole number") from None
