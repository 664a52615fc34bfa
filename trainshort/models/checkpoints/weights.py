"""A file of weights: compared with the model before either takes memory, and with its own checksum as it is read.

The checksum of what we write stands in the header of the safetensors file itself, so that it goes wherever the file
goes. Files without one, of older versions or other libraries, are read all the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainshort.common.messages import shown
from trainshort.common.reading import file_size, refuse_pointer
from trainshort.models.config import ModelConfig

CHECKSUM = "trainshort.sha256"  # in the metadata of the header
# As safetensors names them.
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_HELP = "a model folder holds config.json and model.safetensors"


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each tensor once, however often it is used."""
    seen: set[int] = set()
    stored = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            stored[name] = tensor
    return stored


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The stored tensors as `save_weights` takes them: without gradients, contiguous, on the CPU."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in stored_tensors(model).items()}


def save_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous tensors of the CPU, with a checksum over all of them."""
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        _add(hashed, name, tensors[name])
    safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt", CHECKSUM: hashed.hexdigest()})
    give_usual_mode(path)


def give_usual_mode(path: Path) -> None:
    """As other files have it: safetensors writes for the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def check_fits(build: Callable[[ModelConfig], nn.Module], config: ModelConfig, path: Path, where: str) -> None:
    """Refuse a file whose tensors are not those of the config, from its header alone.

    The model that they are compared with is built on the meta device: neither it nor the tensors take memory.
    where: names the config in errors.
    """
    header = header_of(path)
    if config.num_layers > len(header):
        raise ValueError(
            f"{path}: has {len(header):,} tensors, too few for the {config.num_layers:,} layers of the config"
        )
    try:
        with torch.device("meta"):
            wanted = stored_tensors(build(config))
    except (RuntimeError, TypeError, ValueError) as error:  # torch has a RuntimeError for sizes beyond 2^63
        raise ValueError(f"{where}: {str(error).splitlines()[0]}") from error
    _compare(header, wanted, path)


def take_dtypes(model: nn.Module, path: Path) -> None:
    """Give each tensor of the model the dtype that it has in a file that fits, so that nothing is rounded."""
    header = header_of(path)
    for name, tensor in stored_tensors(model).items():
        tensor.data = tensor.data.to(DTYPES[header[name][0]])


def fill(model: nn.Module, path: Path) -> None:
    """Copy every tensor of a safetensors file into the model: all of them, each of the right shape."""
    wanted = stored_tensors(model)
    _compare(header_of(path), wanted, path)
    hashed = hashlib.sha256()
    with Opened(path) as file, torch.no_grad():
        for name in sorted(wanted):
            tensor = file.get_tensor(name)
            _add(hashed, name, tensor)
            wanted[name].copy_(tensor)
        expected = (file.metadata() or {}).get(CHECKSUM)
    if expected is not None and expected != hashed.hexdigest():
        raise ValueError(
            f"{path}: the weights are not those that were saved (another sha256 than the file names): it is damaged; "
            "copy or download it again"
        )


def header_of(path: Path) -> dict[str, tuple[str, list[int]]]:
    """The dtype and shape of each tensor in a file."""
    with Opened(path) as file:
        slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118
        return {name: (str(each.get_dtype()), list(each.get_shape())) for name, each in slices}


def _compare(header: Mapping[str, tuple[str, list[int]]], wanted: Mapping[str, Tensor], path: Path) -> None:
    _refuse(path, sorted(wanted.keys() - header.keys()), "is missing")
    _refuse(path, sorted(header.keys() - wanted.keys()), "is not in the model")
    for name, target in wanted.items():
        dtype, shape = header[name]
        if shape != list(target.shape):
            raise ValueError(f"{path}: tensor {name!r} is {shown(shape)}, the config wants {list(target.shape)}")
        if dtype not in DTYPES:
            raise ValueError(
                f"{path}: tensor {name!r} is {dtype}, and weights are one of {', '.join(DTYPES)}: convert the file"
            )


def _refuse(path: Path, names: Iterable[str], problem: str) -> None:
    if names := list(names):
        raise ValueError(f"{path}: tensor {shown(names[0])} {problem} ({len(names)} in all)")


class Opened:
    """A safetensors file; what its library complains about becomes an error that names the file."""

    def __init__(self, path: Path) -> None:
        file_size(path, _HELP)
        self.path = path

    def __enter__(self) -> Any:
        try:
            self.file = safe_open(self.path, framework="pt")
            return self.file.__enter__()
        except SafetensorError as error:
            raise self._damaged(error) from error

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.file.__exit__(kind, error, traceback)
        if isinstance(error, SafetensorError):
            raise self._damaged(error) from error

    def _damaged(self, error: SafetensorError) -> ValueError:
        refuse_pointer(self.path)
        reason = " ".join(str(error).split())[:200]
        return ValueError(f"{self.path}: not a whole safetensors file ({reason}); copy or download it again")


def _add(hashed: Any, name: str, tensor: Tensor) -> None:
    """A tensor with all that it is, so that no two sets of tensors are the same bytes."""
    hashed.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    hashed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
