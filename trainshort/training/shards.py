"""Tensors that several processes hold together, in one folder: each writes its shards, any number can read them.

torch.distributed.checkpoint with safetensors as storage: a file a rank, in whose header stands where each shard
belongs. Nothing is pickled on the disk. The folder of a checkpoint that one process wrote is read in the same way.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainshort.common.files import is_full, push_to_disk, sha256
from trainshort.training.processes import Processes

SEEN_WITHIN = 60.0  # seconds: network file systems remember for so long what was not there


def write_shards(tensors: Mapping[str, Tensor], folder: Path, processes: Processes) -> list[dict[str, Any]]:
    """Write what the processes hold into a new folder; returns name, size and sha256 of each file.

    Tensors that are no shards are the same in every process, and one of them writes it.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise _as_error(error) from error
    files = [each for of_rank in processes.together(lambda: _own_files(folder, processes.rank)) for each in of_rank]
    processes.by_first(lambda: _check_files(folder, files))
    return files


def names_in(folder: Path) -> set[str]:
    """The tensors that a folder holds."""
    return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def read_shards(tensors: Mapping[str, Tensor], folder: Path, processes: Processes | None = None) -> None:
    """Fill these tensors, whole ones or shards of them, from a folder. Without processes: by this one for itself."""
    alone = processes is None or processes.kind is None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no processes to share the work with
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)
    except CheckpointException as error:
        raise _as_error(error) from error
    except RuntimeError as error:
        raise ValueError(f"{folder}: not a checkpoint of this model ({_first_line(error)})") from error


def _own_files(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Those that this rank wrote: none, where it had nothing to write."""
    paths = sorted(folder.glob(f"shard-{rank + 1:05}-*.safetensors"))
    return [{"name": path.name, "size": path.stat().st_size, "sha256": sha256(path)} for path in paths]


def _check_files(folder: Path, files: list[dict[str, Any]]) -> None:
    """That rank 0 sees what all wrote: machines may have disks of their own, or take a while to see each other's."""
    end = time.monotonic() + SEEN_WITHIN
    for entry in files:
        path = folder / entry["name"]
        while not (path.is_file() and path.stat().st_size == entry["size"]):
            if time.monotonic() > end:
                raise RuntimeError(
                    f"{path} was written by another process, but is not there for rank 0: the run folder (--out) has "
                    "to be on a file system that all machines share"
                )
            time.sleep(0.5)
            os.listdir(folder)  # asks the server again
    push_to_disk(folder)
    push_to_disk(folder.parent)


def _as_error(error: CheckpointException) -> Exception:
    """One that says which rank could not write or read, and why."""
    rank, (cause, _) = min(error.failures.items())
    text = f"rank {rank}: {_first_line(cause)}"
    if is_full(cause):
        return OSError(getattr(cause, "errno", None) or 28, f"no space left on the disk of rank {rank}")
    return RuntimeError(text)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
