"""evaluation.json: one record for each thing that was measured, each written whole or not at all.

A record says what it is of: which weights, which tokens of which data, in which windows, in which dtype. Only a
record of exactly the same takes its place; all others stay. Perplexity is always a sum of losses over a count.
This file reads and writes without torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trainshort.common.fields import Fields
from trainshort.common.files import sha256, write_json
from trainshort.common.reading import read_json

FORMAT, VERSION = "trainshort evaluation", 2
NAME = "evaluation.json"
IDENTITY = ("model", "data", "split", "first_token", "end_token", "mode", "stride", "length", "dtype", "attention")

Record = dict[str, Any]


def key_of(record: Record) -> tuple[Any, ...]:
    """What tells records of one run apart: figures of different keys are never put together."""
    values = (record.get(name) for name in IDENTITY)
    return tuple(each if isinstance(each, (str, int)) else repr(each) for each in values)  # files may hold anything


def add_record(folder: Path, record: Record, model: str, about: Record | None = None) -> None:
    """Put a record, measured with the weights `model`, into the folder's file, in place of one of the same.

    about: what a report needs to know of a model whose own files lie in another folder (about.py).
    """
    record = {"model": model} | record
    kept = {key_of(each): each for each in read_records(folder)}
    kept[key_of(record)] = record
    ordered = sorted(kept.values(), key=lambda each: (each["mode"], each["length"], each["stride"]))
    described = {} if about is None else {"about": about}
    write_json(folder / NAME, {"format": FORMAT, "version": VERSION, **described, "records": ordered})


def read_records(folder: Path, model: str | None = None) -> list[Record]:
    """All records of a run; with `model`, the fingerprint of its weights, those that were measured with it."""
    path = folder / NAME
    if not path.exists():
        return []
    content = read_json(path, "remove it and evaluate again")
    if content.get("format") != FORMAT or content.get("version") not in (1, VERSION):
        raise ValueError(f"{path}: not an evaluation this trainshort reads; remove it and evaluate again")
    records: list[Record] = Fields(content, str(path), "remove it and evaluate again").list("records")
    for number, record in enumerate(records, 1):
        _check_record(record, f"{path}: record {number}")
    if content["version"] == 1:
        records = from_version_1(content.get("model"), records)
    return [each for each in records if model is None or each.get("model") == model]


def from_version_1(model: Any, records: list[Record]) -> list[Record]:
    """Files of version 1 named the weights once, and no dtype where a length was skipped: that of the others is."""
    dtypes = {str(each["dtype"]) for each in records if "dtype" in each}
    known = {"dtype": next(iter(dtypes))} if len(dtypes) == 1 else {}
    return [{"model": model} | known | each for each in records]


def _check_record(record: object, where: str) -> None:
    """That it says what it is of."""
    fields = Fields(record if isinstance(record, dict) else {}, where, "remove the file and evaluate again")
    fields.whole("length", 1)
    fields.one_of("mode", ("nonoverlapping", "sliding"))
    fields.whole("stride", 1)
    for name in ("first_token", "end_token"):
        if name in fields.values:
            fields.whole(name)
    for name in ("model", "data", "split", "dtype"):
        if fields.values.get(name) is not None:
            fields.text(name)


def fingerprint(path: Path) -> str:
    """Of a file's content, short."""
    return sha256(path)[:16]


def figures(nll_sum: float, tokens: int, words: int | None, size: int | None) -> Record:
    """Perplexity per token and word, and bits per byte; None where the text's words and bytes are not known."""
    return {
        "nll_sum": nll_sum,
        "scored_tokens": tokens,
        "words": words,
        "bytes": size,
        "perplexity": _exp(nll_sum / tokens),
        "perplexity_per_word": _exp(nll_sum / words) if words else None,
        "bits_per_byte": nll_sum / math.log(2) / size if size else None,
    }


def _exp(value: float) -> float | None:
    """None instead of an infinity that JSON does not know."""
    return math.exp(value) if value < 700 else None


def position_edges(length: int) -> list[int]:
    """Borders of bins over the places of a window: two an octave, so that the early places stand apart."""
    edges = [0]
    step = 0
    while edges[-1] < length:
        edge = min(length, round(2 ** (step / 2)))
        if edge > edges[-1]:
            edges.append(edge)
        step += 1
    return edges
