"""That all processes of a run are of one mind, before any of them touches a file: same config, data and versions."""

from __future__ import annotations

import platform
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import trainshort
from trainshort.common.files import sha256
from trainshort.common.messages import shown
from trainshort.data.dataset import TokenData
from trainshort.positions.imported import imported_files
from trainshort.training.config import TrainConfig
from trainshort.training.processes import Processes

ADVICE = "all processes of a run need the same command, data and versions"
_ANYWHERE = ("data",)  # each machine may have its copy in a folder of its own


def require_alike(processes: Processes, about: dict[str, Any]) -> None:
    """Refuse processes that say other things of themselves than rank 0, by the rank and the name of the first."""
    first, *others = processes.gather(about)
    for rank, other in enumerate(others, 1):
        for name in dict.fromkeys((*first, *other)):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"rank {rank} has another {name} than rank 0 ({shown(other.get(name))}, not "
                    f"{shown(first.get(name))}): {ADVICE}"
                )


def about_command(config: TrainConfig) -> dict[str, Any]:
    """The versions and what was asked for: known before the data is opened."""
    values = config.to_dict()
    asked = {each.name: values[each.name] for each in fields(TrainConfig) if each.name not in _ANYWHERE}
    files = {f"imported file {Path(path).name}": sha256(Path(path)) for path in imported_files()}
    versions = {
        "version of trainshort": trainshort.__version__,
        "version of torch": torch.__version__,
        "version of Python": platform.python_version(),
    }
    return versions | asked | files


def about_data(data: TokenData) -> dict[str, Any]:
    """Sizes on the disk, and the hashes that meta.json has for the same files."""
    sizes = {f"size of {name}": (data.folder / name).stat().st_size for name in data.meta["hashes"]}
    hashes = {f"hash of {name}": value for name, value in data.meta["hashes"].items()}
    return sizes | hashes | {"identity of the data": data.identity}
