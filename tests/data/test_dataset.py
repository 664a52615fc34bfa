"""TokenData: refuses what is not whole, and knows the documents, bytes and words of any span."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_prepare import prepared
from tests.data.test_sources import write_rows
from trainshort.data.dataset import TokenData


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = write_rows(tmp_path / "rows.jsonl", [f"text {number} " * 5 for number in range(60)])
    return prepared(rows, tmp_path / "data", validation_fraction=0.2).folder


def test_spans(folder: Path) -> None:
    data = TokenData(folder)
    text = bytes(int(each) for each in data.validation[:50] if each < 256)
    assert data.bytes_of("validation", 0, 50) == len(text)
    assert data.words_of("validation", 0, 50) == len(text.split())
    assert data.count("validation", 7, 7) == (0, 0)
    with pytest.raises(ValueError, match=r"a span of validation lies in \[0, \d+\], got \[0, 1000000\]"):
        data.bytes_of("validation", 0, 1_000_000)
    with pytest.raises(ValueError, match="split must be one of train, validation; got 'test'"):
        data.split("test")


def test_borders_of_a_split_start_at_0_and_end_at_its_end(folder: Path) -> None:
    data = TokenData(folder)
    assert data.borders[0] == 0
    assert data.borders[-1] == len(data.tokens)
    for split in ("train", "validation"):
        borders = data.borders_of(split)
        assert borders[0] == 0
        assert borders[-1] == len(data.split(split))
        assert np.all(data.split(split)[borders[1:] - 1] == data.end_id)
        assert np.count_nonzero(data.split(split) == data.end_id) == len(borders) - 1


def test_folders_that_are_not_whole(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none: no such folder; a folder of tokens is made by prepare"):
        TokenData(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"meta\.json: no such file; a folder of tokens is made by prepare"):
        TokenData(tmp_path)
    meta = (folder / "meta.json").read_text()
    (folder / "meta.json").write_text(meta[:40])
    with pytest.raises(ValueError, match=r"meta\.json: not valid JSON"):
        TokenData(folder)
    (folder / "meta.json").write_text(json.dumps({**json.loads(meta), "version": 99}))
    with pytest.raises(ValueError, match=r"not the meta\.json of a prepared folder of version 1"):
        TokenData(folder)
    (folder / "meta.json").write_text(meta)
    (folder / "documents.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"documents\.bin: no such file"):
        TokenData(folder)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "tokenizer.json"])
def test_files_that_were_cut_or_changed(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(
        ValueError, match=rf"{name} (has .* bytes, meta\.json says .*: it was cut|is not what prepare)"
    ):
        TokenData(folder).verify()
    (folder / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(ValueError, match=rf"{name} is not what prepare wrote"):
        TokenData(folder).verify()
    (folder / name).write_bytes(content)
    TokenData(folder).verify()


def test_identity(folder: Path, tmp_path: Path) -> None:
    before = TokenData(folder).identity
    assert TokenData(folder.rename(tmp_path / "elsewhere")).identity == before
    meta = json.loads((tmp_path / "elsewhere" / "meta.json").read_text())
    train, validation = meta["splits"]["train"], meta["splits"]["validation"]
    train |= {"end": train["end"] - 1, "tokens": train["tokens"] - 1}
    validation |= {"start": validation["start"] - 1, "tokens": validation["tokens"] + 1}
    (tmp_path / "elsewhere" / "meta.json").write_text(json.dumps(meta))
    assert TokenData(tmp_path / "elsewhere").identity != before


def test_tokens_stay_on_the_disk(folder: Path) -> None:
    data = TokenData(folder)
    assert isinstance(data.train, np.memmap)
    assert not data.train.flags.writeable
