"""What torchrun tells the processes that it starts, read from the environment. Light: needs no torch."""

from __future__ import annotations

import os


class EndedByOthersError(RuntimeError):
    """Another process of the run failed first, and has said why."""


def is_launched() -> bool:
    """Whether this process is one of those that torchrun (or whatever sets the same variables) has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return _number("RANK", 0)


def local_rank() -> int:
    """Among the processes of this machine."""
    return _number("LOCAL_RANK", rank())


def number_of_processes() -> int:
    return _number("WORLD_SIZE", 1)


def restarts() -> int:
    """How often torchrun --max-restarts has started the processes again after a failure."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment says {name}={text!r}, which torchrun sets to a whole number") from None
