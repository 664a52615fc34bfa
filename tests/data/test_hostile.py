"""Folders of tokens from strangers: read, or refused in a sentence; no crash, and no file outside the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_prepare import prepared
from tests.data.test_sources import write_rows
from tests.hostile_json import EVERY, survives
from trainshort.data.dataset import TokenData


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = write_rows(tmp_path / "rows.jsonl", [f"text {number} " * 5 for number in range(60)])
    return prepared(rows, tmp_path / "data", validation_fraction=0.2).folder


def change_meta(folder: Path, **values: Any) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def use_all(folder: Path) -> None:
    """Everything that training and evaluation ask of a folder."""
    data = TokenData(folder)
    for split in ("train", "validation"):
        np.asarray(data.split(split)).sum()
        data.borders_of(split)
        data.count(split)
    data.tokenizer.decode(data.validation[:20].tolist())
    data.verify()
    data.summary()
    assert data.identity


@pytest.mark.parametrize(
    "dtype", ["O", "f2", "i2", "u2", "<u2", ">u2", "uint8", "S2", "V2", "object", "uint32", 2, None]
)
def test_only_dtypes_that_are_written_are_read(folder: Path, dtype: Any) -> None:
    """As object pointers the tokens would be addresses, and reading them a crash."""
    change_meta(folder, dtype=dtype)
    with pytest.raises(ValueError, match=r"meta\.json: dtype has to be (one of uint16, uint32|uint16 for a vocab)"):
        TokenData(folder)


@pytest.mark.parametrize(
    ("train", "validation"),
    [
        ((0, 10**6), (10**6, 10**6)),
        ((-5, 10), (10, 3000)),
        ((0, 50), (40, 3000)),
        ((0, 50), (60, 3000)),
        ((0, 5), (5, 9)),
    ],
)
def test_splits_out_of_range(folder: Path, train: tuple[int, int], validation: tuple[int, int]) -> None:
    splits = json.loads((folder / "meta.json").read_text())["splits"]
    for name, (start, end) in (("train", train), ("validation", validation)):
        splits[name] |= {"start": start, "end": end, "tokens": end - start}
    change_meta(folder, splits=splits)
    with pytest.raises(ValueError, match=r"meta\.json: splits"):
        TokenData(folder)


@pytest.mark.parametrize("every", EVERY)
def test_meta_json(folder: Path, every: int) -> None:
    survives(folder / "meta.json", lambda: use_all(folder), home=folder, every=every)


def test_a_meta_json_that_is_larger_than_any_we_write(folder: Path) -> None:
    with (folder / "meta.json").open("ab") as file:
        file.truncate(2**40)  # a hole: it takes no room on the disk
    with pytest.raises(ValueError, match=r"meta\.json: has 1,099,511,627,776 bytes, and at most 67,108,864 are read"):
        TokenData(folder)


@pytest.mark.parametrize("name", ["meta.json", "tokens.bin", "documents.bin"])
def test_pipes_and_devices(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=rf"{name}: not a file \(but a folder, a device or a pipe\)"):
        TokenData(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=rf"{name}: not a file"):
        TokenData(folder)


def test_documents_out_of_order(folder: Path) -> None:
    borders = np.fromfile(folder / "documents.bin", dtype="<i8")
    borders[3], borders[5] = 10**12, -(10**12)
    borders.tofile(folder / "documents.bin")
    data = TokenData(folder)
    with pytest.raises(ValueError, match=r"documents\.bin: documents do not follow each other"):
        data.borders_of("train")


def test_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ["the dog"] * 60)
    folder = prepared(rows, tmp_path / "data", vocab=270).folder
    tokens = np.fromfile(folder / "tokens.bin", dtype="<u2")
    tokens[5] = 60_000
    tokens.tofile(folder / "tokens.bin")
    with pytest.raises(ValueError, match=r"tokens\.bin holds a token beyond its vocabulary of 26"):
        TokenData(folder).count("train")
