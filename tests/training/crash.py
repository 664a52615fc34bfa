"""A program that dies while it writes a checkpoint: at the first thing it does to the disk, then at the second, ...

Run as `python -m tests.training.crash FOLDER`. Each death is that of a forked process, without any cleaning up, as by
kill -9 or a power cut. Prints a line for each: which checkpoint was there afterwards, and what else.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from trainshort.training.run import RunFolder

DEAD = 9


class Countdown:
    """Dies at the n-th operation, halfway through it where it writes a file."""

    def __init__(self, left: int) -> None:
        self.left = left

    def due(self) -> bool:
        self.left -= 1
        return self.left == 0

    def wrap(self, owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def changed(*arguments: Any, **options: Any) -> Any:
            if self.due():
                os._exit(DEAD)
            return before(*arguments, **options)

        setattr(owner, name, changed)

    def wrap_writer(self, owner: Any, name: str, place: int) -> None:
        """Writes all of the file, cuts it in half, and dies."""
        before = getattr(owner, name)

        def changed(*arguments: Any, **options: Any) -> Any:
            result = before(*arguments, **options)
            if self.due():
                path = Path(arguments[place])
                os.truncate(path, path.stat().st_size // 2)
                os._exit(DEAD)
            return result

        setattr(owner, name, changed)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((64, 64), value)}


def state(step: int) -> dict[str, Any]:
    """Of a run that ends with this step, with all that is asked of one."""
    about = {"config": {"steps": step}, "data": {"identity": "text", "files": {}}, "environment": {}}
    return {"step": step, "finished": True, "seconds": 0.0, **about}


def save(folder: Path, step: int) -> None:
    run = RunFolder(folder)
    folder.mkdir(exist_ok=True)
    (folder / "train.json").touch()
    with run.locked():
        run.save(state(step), tensors(float(step)), tensors(-float(step)))


def die(folder: Path, operation: int) -> bool:
    """Save step 2, dying at that operation. Whether there was such an operation."""
    if (child := os.fork()) == 0:
        countdown = Countdown(operation)
        for name in ("replace", "link", "fsync", "unlink"):
            countdown.wrap(os, name)
        countdown.wrap(Path, "unlink")
        countdown.wrap_writer(safetensors.torch, "save_file", 1)
        countdown.wrap_writer(Path, "write_text", 0)
        countdown.wrap_writer(Path, "write_bytes", 0)
        try:
            save(folder, 2)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == DEAD


def inspect(folder: Path) -> dict[str, Any]:
    """Which checkpoint can be loaded, and whether a next one can be saved after it."""
    saved = RunFolder(folder).load()
    optimizer = float(saved.optimizer["weight"].mean())
    model = float(safetensors.torch.load_file(saved.model)["weight"].mean())
    published = float(safetensors.torch.load_file(folder / "model.safetensors")["weight"].mean())
    finished = RunFolder(folder).finished
    save(folder, 3)
    left = sorted(path.name for path in folder.rglob("*") if path.is_file())
    found = {"step": saved.step, "model": model, "optimizer": -optimizer, "published": published, "left": left}
    return {**found, "finished": finished, "next": RunFolder(folder).load().step}


def main(root: Path) -> None:
    operation, died = 0, True
    while died:
        operation += 1
        folder = root / str(operation)
        save(folder, 1)
        died = die(folder, operation)
        print(json.dumps({"operation": operation, "died": died, **inspect(folder)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
