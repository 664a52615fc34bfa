"""The weights of a folder: one safetensors file, or several and an index that says which tensor lies in which.

Only headers are read here. Pickles are never opened: `trainshort convert` is the one way to read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.common.checks import is_plain_name
from trainshort.common.messages import shown
from trainshort.common.reading import read_json
from trainshort.models.checkpoints.weights import DTYPES, Opened, header_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class Stored(NamedTuple):
    """A tensor on the disk."""

    file: Path
    name: str
    kind: str  # its dtype, as safetensors names it
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        if self.kind not in DTYPES:
            raise ValueError(
                f"{self.file}: tensor {shown(self.name)} is {self.kind}, and weights are one of {', '.join(DTYPES)}: "
                "convert the file"
            )
        return DTYPES[self.kind]

    def read(self) -> Tensor:
        """The values. The file is closed again, so that only this tensor of it stays in memory."""
        with Opened(self.file) as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor


class Weights(NamedTuple):
    """All tensors of a folder by name, and the file that lists them. prefix: that was taken away from their names."""

    path: Path
    tensors: dict[str, Stored]
    prefix: str = ""


def find_weights(folder: Path) -> Weights:
    """The weights of a folder, from the headers of its files."""
    if (path := folder / SINGLE).exists():
        return Weights(path, {name: Stored(path, name, *about) for name, about in _headers(path).items()})
    if (path := folder / INDEX).exists():
        return Weights(path, _indexed(path))
    for name in PICKLES:
        if (folder / name).exists():
            raise ValueError(
                f"{folder / name}: pickled weights can run code when they are read, and are not; "
                f"`trainshort convert {folder} --out NEW` makes a folder with safetensors of them"
            )
    raise FileNotFoundError(f"{folder}: has neither {SINGLE} nor {INDEX}, so it holds no weights")


def _indexed(index: Path) -> dict[str, Stored]:
    places = read_json(index, "an index says which tensor lies in which file").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: weight_map, which says where each tensor lies, is missing")
    for tensor, file in places.items():
        if not is_plain_name(file) or not file.endswith(".safetensors"):
            raise ValueError(
                f"{index}: tensor {shown(tensor)} is said to lie in {shown(file)}; that must be the name of a "
                "safetensors file in the same folder"
            )
    headers = {file: _headers(index.with_name(file)) for file in sorted(set(places.values()))}
    for tensor, file in places.items():
        if tensor not in headers[file]:
            raise ValueError(f"{index.with_name(file)}: tensor {shown(tensor)} is missing; {index.name} names it")
    for file, header in headers.items():
        for tensor in header:
            if places.get(tensor) != file:
                raise ValueError(
                    f"{index.with_name(file)}: has the tensor {shown(tensor)}, which {index.name} does not place "
                    "there: they are not of one model; copy or download both again"
                )
    return {tensor: Stored(index.with_name(file), tensor, *headers[file][tensor]) for tensor, file in places.items()}


def _headers(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (kind, tuple(shape)) for name, (kind, shape) in header_of(path).items()}
