"""`trainshort train` as torchrun starts it, in which one rank is killed: in the middle of a step, or of a write.

FAULT in the environment: the rank, "step" or "write", and which of them. After a restart by torchrun nothing happens.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from safetensors import torch as safetensors_torch

from trainshort.cli.main import start
from trainshort.models import LanguageModel


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_step(number: int) -> None:
    """Between the forward and the backward pass of a step."""
    loss, calls = LanguageModel.loss, [0]

    def losing(*arguments: Any, **options: Any) -> Any:
        result = loss(*arguments, **options)
        calls[0] += 1
        if calls[0] == number:
            die()
        return result

    LanguageModel.loss = losing  # type: ignore[method-assign]


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
    if os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        {"step": die_in_step, "write": die_in_write}[place](int(number))
    start()
