"""meta.json of a folder of tokens: what prepare writes in it, and nothing else is read from one.

What it says decides what numpy maps into memory, which files are opened and where a split begins, so every entry is
checked before any is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainshort.common.checks import LARGEST_SIZE
from trainshort.common.fields import Fields
from trainshort.common.reading import read_json

FORMAT = "trainshort-data"
VERSION = 1
DTYPES = {"uint16": "<u2", "uint32": "<u4"}  # the only ones that are written, and so the only ones that are read
FILES = ("tokens.bin", "documents.bin", "spans.bin", "tokenizer.json")
COUNTS = ("documents", "bytes", "words")


def read_meta(path: Path, what: str) -> dict[str, Any]:
    """The contents of a meta.json, checked; `what` ends the errors with what to do."""
    values = read_json(path, what)
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        raise ValueError(f"{path}: not the meta.json of a prepared folder of version {VERSION}; {what}")
    meta = Fields(values, str(path), what)
    vocabulary = meta.whole("vocab_size", 1, LARGEST_SIZE)
    meta.whole("end_id", 0, vocabulary - 1)
    meta.flag("spans")
    meta.text("tokenizer")
    dtype = meta.one_of("dtype", tuple(DTYPES))
    if dtype != dtype_name(vocabulary):
        raise meta.refuse(f"dtype has to be {dtype_name(vocabulary)} for a vocabulary of {vocabulary:,}, got {dtype}")
    for name in COUNTS:
        meta.whole(name)
    _check_splits(meta.object("splits"), meta.whole("tokens"))
    _check_hashes(meta.object("hashes"), with_spans=meta.flag("spans"))
    _check_config(meta.object("config"))
    if "validation" in values:  # older folders do not say how it was chosen
        _check_validation(meta.object("validation"))
    if "links_left_out" in values:
        meta.whole("links_left_out")
    return values


def dtype_name(vocab_size: int) -> str:
    """Of the tokens of a vocabulary of that size."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def _check_splits(splits: Fields, tokens: int) -> None:
    """The training tokens, then those for validation, and nothing beside them."""
    if set(splits.values) != {"train", "validation"}:
        raise splits.refuse("has to be train and validation")
    begin = 0
    for name in ("train", "validation"):
        split = splits.object(name)
        start, end = split.whole("start"), split.whole("end")
        if start != begin or not start <= end <= tokens or split.whole("tokens") != end - start:
            raise split.refuse(f"has to go from {begin:,} to at most {tokens:,}, got {start:,} to {end:,}")
        for count in COUNTS:
            split.whole(count)
        begin = end
    if begin != tokens:
        raise splits.refuse(f"has to end at {tokens:,}, the number of tokens, got {begin:,}")


def _check_hashes(hashes: Fields, *, with_spans: bool) -> None:
    wanted = {name for name in FILES if with_spans or name != "spans.bin"}
    if set(hashes.values) != wanted:
        raise hashes.refuse(f"has to be those of {', '.join(sorted(wanted))}")
    for name in wanted:
        hashes.digest(name)


def _check_validation(validation: Fields) -> None:
    validation.text("how")
    validation.number("share")
    for name in ("seed", "asked"):  # none where nothing was drawn
        if validation.values.get(name) is not None:
            validation.number(name)


def _check_config(config: Fields) -> None:
    if config.values.get("end_token") is not None:
        config.text("end_token")
    if not all(isinstance(each, str) for each in config.list("sources")):
        raise config.refuse("sources has to be a list of texts")
