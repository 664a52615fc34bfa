"""recall.json: one record for each task and length that recall was measured at. Read and written without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainshort.common.fields import Fields
from trainshort.common.files import write_json
from trainshort.common.reading import read_json

FORMAT, VERSION = "trainshort recall", 1
NAME = "recall.json"
IDENTITY = ("model", "data", "split", "task", "length", "depths", "trials", "choices", "seed", "dtype")
ADVICE = "remove it and evaluate again"

Record = dict[str, Any]


def key_of(record: Record) -> tuple[str, ...]:
    return tuple(repr(record.get(name)) for name in IDENTITY)


def add_record(folder: Path, record: Record) -> None:
    """Put a record into the folder's file, in place of one of exactly the same."""
    kept = {key_of(each): each for each in read_records(folder)}
    kept[key_of(record)] = record
    ordered = sorted(kept.values(), key=lambda each: (each["task"], each["length"]))
    write_json(folder / NAME, {"format": FORMAT, "version": VERSION, "records": ordered})


def read_records(folder: Path) -> list[Record]:
    path = folder / NAME
    if not path.exists():
        return []
    content = read_json(path, ADVICE)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise ValueError(f"{path}: not a recall.json this trainshort reads; {ADVICE}")
    records: list[Record] = Fields(content, str(path), ADVICE).list("records")
    for number, record in enumerate(records, 1):
        fields = Fields(record if isinstance(record, dict) else {}, f"{path}: record {number}", ADVICE)
        fields.text("task")
        fields.whole("length", 1)
    return records
