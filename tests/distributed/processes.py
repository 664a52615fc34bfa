"""Run a function on several ranks, a process each, that talk by gloo."""

from __future__ import annotations

import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def _start(
    rank: int, size: int, store: str, results: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        results.put((rank, function(*arguments), None))
    except Exception as error:
        results.put((rank, None, (type(error).__name__, str(error), traceback.format_exc())))
    finally:
        dist.destroy_process_group()


def run_ranks(
    folder: Path, size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 300.0
) -> list[Any]:
    """What the function returns on each rank; or the error it raised there, as (name of its class, message, trace).

    function: of a module, so that processes find it; what it returns must be no tensor (pass numpy arrays).
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(
            target=_start, args=(rank, size, str(folder / "store"), results, function, arguments), daemon=True
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    end = time.monotonic() + seconds
    try:
        while len(found) < size:
            try:
                rank, value, error = results.get(timeout=1.0)
                found[rank] = value if error is None else error
            except queue.Empty:
                dead = [
                    rank for rank, process in enumerate(processes) if not process.is_alive() and rank not in found
                ]
                if dead and results.empty():
                    raise AssertionError(f"ranks {dead} died") from None
                if time.monotonic() > end:
                    raise AssertionError(
                        f"ranks {sorted(set(range(size)) - set(found))} did not end in time"
                    ) from None
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
    return [found[rank] for rank in range(size)]
