"""What torchrun starts for the tests: works off a list of cases in one process group, and writes what came of them.

Run as `torchrun ... -m tests.distributed.worker CASES.json`; rank N writes CASES.json.N.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainshort
from tests.distributed.gradients import largest_differences
from trainshort.training.config import TrainConfig
from trainshort.training.launch import run_and_end
from trainshort.training.run import Interrupted
from trainshort.training.train import train


def stop_after(steps: int | None) -> Callable[[], bool]:
    left = [steps or 10**9]

    def stop() -> bool:
        left[0] -= 1
        return left[0] == 0

    return stop


def no_space(*arguments: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def train_case(case: dict[str, Any], patch: pytest.MonkeyPatch) -> Any:
    """Train, with what is different on one rank: its config, its version of trainshort, or room on its disk."""
    config = dict(case["train"])
    odd = case.get("odd_rank") == dist.get_rank()
    if odd:
        config |= case.get("odd_config", {})
        if "odd_version" in case:
            patch.setattr(trainshort, "__version__", case["odd_version"])
        if "full_after" in case:
            saves = [0]
            write = torch.distributed.checkpoint.filesystem._write_files_from_queue

            def writing(*arguments: Any, **options: Any) -> Any:
                saves[0] += 1
                return (no_space if saves[0] > case["full_after"] else write)(*arguments, **options)

            patch.setattr(torch.distributed.checkpoint.filesystem, "_write_files_from_queue", writing)
    try:
        stop = stop_after(case.get("stop_after"))
        train(TrainConfig(**config), progress=False, resume=case.get("resume", False), stop=stop)
    except Interrupted:
        return "interrupted"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def main() -> int:
    path = Path(sys.argv[1])
    dist.init_process_group("gloo")
    found = []
    for case in json.loads(path.read_text()):
        with pytest.MonkeyPatch.context() as patch:
            found.append(train_case(case, patch) if "train" in case else largest_differences(**case["gradients"]))
        dist.barrier()
    Path(f"{path}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()
    return 0


if __name__ == "__main__":
    run_and_end(main)  # as the command line does
