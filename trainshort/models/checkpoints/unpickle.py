"""The one program that reads pickled weights: `python unpickle.py IN.bin OUT.safetensors`, in a process of its own.

torch unpickles tensors and plain containers only (weights_only): a file that wants anything else is refused. Nothing
else is read, and nothing of this package is imported. The last line of its output is JSON: what was written, or the
reason why nothing was.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def plain_tensors(state: Any) -> tuple[dict[str, Tensor], int]:
    """Contiguous tensors by name, each with memory of its own, and how many had to be copied for that."""
    if not isinstance(state, dict) or not state:
        raise ValueError(f"holds {type(state).__name__}, not tensors by name")
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    copied = 0
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"holds {type(tensor).__name__} as {str(name)[:80]!r}, where a dense tensor should be")
        plain = tensor.detach().contiguous()
        storage = plain.untyped_storage().data_ptr()
        if storage in storages:  # a tied pair, or two parts of one tensor: safetensors has no such thing
            plain, copied = plain.clone(), copied + 1
        storages.add(storage)
        tensors[name] = plain
    return tensors, copied


def convert_file(source: str, target: str) -> dict[str, Any]:
    mapped = zipfile.is_zipfile(source)  # then only what is being written needs memory
    state = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    tensors, copied = plain_tensors(state)
    save_file(tensors, target, metadata={"format": "pt"})
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return {"names": sorted(tensors), "bytes": size, "copied": copied}


def reason_of(error: Exception) -> str:
    """The first line; of torch's page on a refused pickle the sentence that says what the file wanted."""
    text = str(error)
    if isinstance(error, UnpicklingError):
        said = text.partition("\n\nCheck the documentation")[0]
        text = re.split("WeightsUnpickler error:|\n\n", said)[-1].partition(" Please use")[0]
    return [*text.strip().splitlines(), ""][0]


def main() -> int:
    try:
        answer = convert_file(*sys.argv[1:])
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {reason_of(error)[:300]}"}
    print(json.dumps(answer))
    return int("error" in answer)


if __name__ == "__main__":
    sys.exit(main())
