"""evaluation.json holds whole records, whatever happens while one is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainshort.evaluation.records import add_record, figures, key_of, position_edges, read_records


def record(length: int, **more: object) -> dict[str, object]:
    return {"length": length, "mode": "nonoverlapping", "stride": length, **more}


def test_a_record_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    add_record(tmp_path, record(32, perplexity=1.0), "a")
    add_record(tmp_path, record(16, perplexity=2.0), "a")
    add_record(tmp_path, record(32, perplexity=3.0), "a")
    assert [each["perplexity"] for each in read_records(tmp_path)] == [2.0, 3.0]
    assert read_records(tmp_path, "b") == []
    assert len(read_records(tmp_path, "a")) == 2


@pytest.mark.parametrize(
    ("name", "other"),
    [("data", "b"), ("split", "train"), ("first_token", 2), ("end_token", 9), ("mode", "sliding"), ("stride", 8),
     ("dtype", "bfloat16"), ("length", 64)],
)  # fmt: skip
def test_a_record_of_something_else_takes_nobodys_place(tmp_path: Path, name: str, other: object) -> None:
    same = {"data": "a", "split": "validation", "first_token": 1, "end_token": 65, "dtype": "float32"}
    add_record(tmp_path, record(32, **same, perplexity=1.0), "a")
    add_record(tmp_path, record(32, **same, perplexity=2.0) | {name: other}, "a")
    assert sorted(each["perplexity"] for each in read_records(tmp_path)) == [1.0, 2.0]
    add_record(tmp_path, record(32, **same, perplexity=3.0), "a")
    assert sorted(each["perplexity"] for each in read_records(tmp_path)) == [2.0, 3.0]


def test_records_of_earlier_weights_stay(tmp_path: Path) -> None:
    add_record(tmp_path, record(32, perplexity=1.0), "a")
    add_record(tmp_path, record(32, perplexity=2.0), "b")
    assert [each["perplexity"] for each in read_records(tmp_path, "a")] == [1.0]
    assert [each["perplexity"] for each in read_records(tmp_path, "b")] == [2.0]


def test_records_that_say_strange_things_of_themselves_are_told_apart() -> None:
    strange: list[object] = [{"a": 1}, [1, 2], 1.5, None]
    assert len({key_of(record(32, data=each)) for each in strange * 2}) == len(strange)


def test_files_of_version_1_are_read_and_extended(tmp_path: Path) -> None:
    records = [record(32, data="x", dtype="float32", perplexity=1.0), record(64, data="x", skipped="no room")]
    old = {"format": "trainshort evaluation", "version": 1, "model": "a", "records": records}
    (tmp_path / "evaluation.json").write_text(json.dumps(old))
    assert [(each["model"], each["dtype"]) for each in read_records(tmp_path)] == [("a", "float32")] * 2
    assert read_records(tmp_path, "b") == []
    add_record(tmp_path, record(32, data="x", dtype="float32", perplexity=2.0), "b")
    assert [each["perplexity"] for each in read_records(tmp_path) if "perplexity" in each] == [1.0, 2.0]
    assert len(read_records(tmp_path, "a")) == 2


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_record(tmp_path, record(32), "a")
    before = (tmp_path / "evaluation.json").read_bytes()

    def fail(*_: object) -> None:
        raise OSError("interrupted")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="interrupted"):
        add_record(tmp_path, record(64), "a")
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]
    assert (tmp_path / "evaluation.json").read_bytes() == before


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"format": "other"})])
def test_what_is_no_evaluation_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(ValueError, match="remove it and evaluate again"):
        read_records(tmp_path)


def test_perplexity_too_large_for_a_float_is_none() -> None:
    assert figures(1e6, 10, None, None)["perplexity"] is None


@pytest.mark.parametrize("length", [1, 2, 3, 10, 1000, 65536])
def test_bins_cover_every_place_once(length: int) -> None:
    edges = position_edges(length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert edges == sorted(set(edges))
    assert edges[1] == 1  # the very first place stands alone
