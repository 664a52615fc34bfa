"""`trainshort` as torchrun starts it, in which one rank is killed: in the middle of a step, of a write, or of a
window of an evaluation. Or it fails in a step, with an exchange begun that the others don't join.

FAULT in the environment: the rank, "step", "write", "window" or "error", and which of them. After a restart by
torchrun nothing happens.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors import torch as safetensors_torch

from trainshort.cli.main import start
from trainshort.models import LanguageModel

begun: list[Any] = []  # exchanges that nobody waits for


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_step(number: int, happens: Callable[[], None]) -> None:
    """Between the forward and the backward pass of a step."""
    loss, calls = LanguageModel.loss, [0]

    def losing(*arguments: Any, **options: Any) -> Any:
        result = loss(*arguments, **options)
        calls[0] += 1
        if calls[0] == number:
            happens()
        return result

    LanguageModel.loss = losing  # type: ignore[method-assign]


def die_in_window(number: int) -> None:
    import trainshort.evaluation.score as score

    share, calls = score._losses_over_ranks, [0]

    def sharing(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            die()
        return share(*arguments)

    score._losses_over_ranks = sharing


def fail() -> None:
    dist.barrier()
    begun.append(dist.all_reduce(torch.ones(4), async_op=True))
    raise ValueError("failed on purpose")


def stay() -> None:
    dist.barrier()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(600)


def die_in_write(number: int) -> None:
    """With half of the rank's file written, though not yet on the disk."""
    import torch.distributed.checkpoint.filesystem as filesystem

    save, calls = safetensors_torch.save, [0]

    class Half(bytes):
        """Written like any bytes; who does it dies."""

    write = filesystem._write_files_from_queue

    def halved(*arguments: Any, **options: Any) -> bytes:
        content: bytes = save(*arguments, **options)
        calls[0] += 1
        return Half(content[: len(content) // 2]) if calls[0] == number else content

    def writing(*arguments: Any, **options: Any) -> Any:
        write(*arguments, **options)
        if calls[0] == number:
            die()

    safetensors_torch.save = halved
    filesystem._write_files_from_queue = writing


if __name__ == "__main__":
    rank, place, number = os.environ["FAULT"].split()
    here = os.environ["RANK"] == rank
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if place == "error":
            in_step(int(number), fail if here else stay)
        elif here:
            faults = {"step": lambda number: in_step(number, die), "write": die_in_write, "window": die_in_window}
            faults[place](int(number))
    start()
