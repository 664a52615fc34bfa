"""Model folders from strangers: no memory beyond what the weights take, and no damage that goes unnoticed."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import trainshort as ts
from tests.hostile_json import EVERY, survives
from tests.models.largest import Largest
from tests.models.saved import assert_same_model, tiny_tokenizer
from tests.models.small import encoder, language_model
from tests.models.test_checkpoints import change_config, change_tensors
from trainshort.models.checkpoints.weights import CHECKSUM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = language_model()
    model.tokenizer = tiny_tokenizer()
    ts.save(model, tmp_path / "model")
    return tmp_path / "model"


class OnTheCpu(Largest):
    """Elements of the largest tensor that took memory: on the meta device none does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.elements
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, torch.Tensor) and out.is_meta:
            self.elements = before
        return out


def load(folder: Path) -> None:
    with OnTheCpu() as largest:
        ts.load(folder)
    assert largest.elements < 100_000


@pytest.mark.parametrize(
    "sizes",
    [
        {"d_model": 2**30, "num_heads": 2},
        {"vocab_size": 2**31 - 1},
        {"num_layers": 2**31 - 1},
        {"num_layers": 10**6},
        {"d_ff": 2**31 - 1},
        {"num_heads": 2**31 - 1, "head_dim": 1},
        {"head_dim": 2**31 - 1},
        {"token_types": 2**31 - 1},
        {"position": "learned", "max_length": 2**31 - 1},
        {"position": "t5", "position_options": {"buckets": 2**30, "max_distance": 2**31 - 1}},
    ],
    ids=str,
)
def test_a_config_that_claims_more_than_the_weights_hold(folder: Path, sizes: dict[str, Any]) -> None:
    """Refused from the header: nothing of that size was made, not even for a moment."""
    change_config(folder, lambda header: header["model"].update(sizes))
    said = r"model\.safetensors: (tensor|has \d+ tensors, too few)|config\.json: Storage size"
    with OnTheCpu() as largest, pytest.raises(ValueError, match=said):
        ts.load(folder)
    assert largest.elements < 100_000


LITTLE = """
import resource, sys
import trainshort as ts
ts.LanguageModel
size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
try:
    ts.load(sys.argv[1])
except ValueError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - size) // 2**20, error)
"""


@pytest.mark.slow
def test_a_small_folder_takes_little_memory(folder: Path) -> None:
    change_config(folder, lambda header: header["model"].update(d_model=2**14, d_ff=2**17, num_heads=4))
    found = subprocess.run([sys.executable, "-c", LITTLE, str(folder)], capture_output=True, text=True, timeout=120)
    megabytes, _, message = found.stdout.partition(" ")
    assert "the config wants" in message, found.stderr
    assert int(megabytes) < 300
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 3 * 2**20


@pytest.mark.parametrize("every", EVERY)
def test_config_json(folder: Path, every: int) -> None:
    survives(folder / "config.json", lambda: load(folder), home=folder, every=every)


@pytest.mark.parametrize("kind", [language_model, encoder])
def test_flipped_bytes_in_weights_are_noticed(tmp_path: Path, kind: Any) -> None:
    """In every part of the file: a single bit that was another when it was saved."""
    ts.save(kind(), tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    for place in [8 + length, 8 + length + 77, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"model\.safetensors: the weights are not those that were saved"):
            ts.load(tmp_path)
    for place in range(0, 8 + length, 97):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            found = ts.load(tmp_path)
        except ValueError as error:
            assert "model.safetensors" in str(error)  # noqa: PT017
        else:  # a letter of the metadata that says nothing about the tensors
            assert_same_model(found, kind())


def test_weights_without_a_checksum_are_read(folder: Path) -> None:
    """Those of older versions, and of other libraries."""
    before = ts.load(folder)
    change_tensors(folder, lambda tensors: None)
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        assert CHECKSUM not in (file.metadata() or {})
    assert isinstance(before, ts.LanguageModel)
    assert_same_model(ts.load(folder), before)


STRANGE = [torch.int8, torch.bool, torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", STRANGE, ids=str)
@pytest.mark.parametrize("name", ["trunk.embedding.weight", "trunk.final_norm.weight"])
def test_weights_that_are_no_real_numbers(folder: Path, dtype: torch.dtype, name: str) -> None:
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones_like(tensors[name]).to(dtype)}))
    with pytest.raises(ValueError, match=rf"tensor '{name}' is \w+, and weights are one of F16, BF16, F32, F64"):
        ts.load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_pipes_and_devices(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=rf"{name}: not a file \(but a folder, a device or a pipe\)"):
        ts.load(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=rf"{name}: not a file"):
        ts.load(folder)


def write_header(path: Path, header: bytes, *, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 10_000,
        json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode(),
        json.dumps({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}).encode(),
        json.dumps({"x": {"dtype": "F32", "shape": [2**33, 2**33], "data_offsets": [0, 0]}}).encode(),
        json.dumps({"x": {"dtype": "O", "shape": [], "data_offsets": [0, 0]}}).encode(),
        json.dumps({"a\nb": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode(),
        json.dumps({"__metadata__": {"x": 3}}).encode(),
    ],
)
def test_headers_that_lie(folder: Path, header: bytes) -> None:
    write_header(folder / "model.safetensors", header)
    with pytest.raises(ValueError, match=r"model\.safetensors: ") as refused:
        ts.load(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 2**33, 10**9])
def test_a_header_that_claims_to_be_long(folder: Path, length: int) -> None:
    write_header(folder / "model.safetensors", b"{}", length=length)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
        ts.load(folder)
