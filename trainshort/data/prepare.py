"""From sources to a folder of tokens: tokens.bin and documents.bin, tokenizer.json, and meta.json at the very end.

tokens.bin holds the training documents and then those for validation; meta.json has the border. Which documents are
kept for validation depends on the text alone, so it is the same for every tokenizer. Where documents are too few or
too long to be drawn, the last part of the training text is taken instead: the border moves back.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainshort.data.config import PrepareConfig
from trainshort.data.counts import AT_ONCE, Counts, tail
from trainshort.data.encode import token_dtype
from trainshort.data.files import free_space, is_full, push_to_disk, remove_partials, write_json
from trainshort.data.meta import FORMAT, VERSION
from trainshort.data.progress import byte_bar
from trainshort.data.sources import HF, Sources, hub_name, load_hub
from trainshort.data.text import Part
from trainshort.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from trainshort.data.workers import encode_all
from trainshort.data.writer import FileSlices, SplitWriter

BATCH_TEXT = 2**20  # characters
BATCH_PARTS = 4096
SPLITS = ("train", "validation")


def prepare(config: PrepareConfig, *, progress: bool = True) -> Path:
    """Write the folder that the config asks for; returns its path."""
    folder = Path(config.out)
    if (folder / "meta.json").exists() and not config.overwrite:
        raise FileExistsError(
            f"{folder} holds prepared data already: choose another folder with out (--out), or replace it with "
            "overwrite (--overwrite)"
        )
    sources, validation = _sources(config)
    tokenizer = _tokenizer(config, sources, bool(validation), progress)
    if tokenizer.end_id is None:
        raise ValueError(
            f"{config.tokenizer} has no token of a known name to end documents with: name one with --end-token"
        )
    folder.mkdir(parents=True, exist_ok=True)
    remove_partials(folder)
    table = tokenizer.token_bytes()
    counts = None if table is None else Counts(table)
    writers: dict[str, SplitWriter] = {}
    try:
        for split in SPLITS:
            writers[split] = SplitWriter(folder, split, counts)
        writers["train"]._write("documents", np.zeros(1, dtype="<i8"))
        with byte_bar("tokens", sum(each.total for each in (sources, validation) if each), show=progress) as advance:
            batches = _batches(_assigned(config, sources, validation, advance))
            for split, encoded in encode_all(batches, tokenizer, spans=counts is None, workers=config.workers):
                writers[split].append(encoded)
        if not writers["train"].tokens:
            raise ValueError(f"{' '.join(config.sources)}: no text in it")
        writers["train"].extend(writers["validation"])
        writers["train"].close()
        meta = _meta(config, tokenizer, writers, explicit=bool(validation))
        _move_into_place(folder, writers["train"], tokenizer, meta)
    except Exception as error:
        if not is_full(error):
            raise
        raise RuntimeError(
            f"{folder}: no space left on the disk ({free_space(folder)}); a token takes 2 bytes, or 4 with more than "
            "65,536 of them. Nothing there was changed: free some space and run it again"
        ) from error
    finally:
        for writer in writers.values():
            writer.discard()
    return folder


def _sources(config: PrepareConfig) -> tuple[Sources, Sources | None]:
    def make(names: tuple[str, ...]) -> Sources:
        return Sources(names, config.text_field, config.pattern, config.document_start, config.errors)

    names = config.validation
    if not names and config.validation_fraction > 0:  # data sets often bring a validation split of their own
        hub = [name for name in config.sources if name.startswith(HF) and ":" not in name.removeprefix(HF)]
        if len(hub) == len(config.sources) and all("validation" in load_hub(name) for name in hub):
            names = tuple(f"{HF}{hub_name(name)[0]}:validation" for name in hub)
    return make(config.sources), make(names) if names else None


def _tokenizer(config: PrepareConfig, sources: Sources, explicit: bool, progress: bool) -> Tokenizer:
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer, end_token=config.end_token)
    if config.vocab is None:
        return ByteTokenizer()
    wanted = config.bpe_sample_mb * 2**20
    chance = wanted / sources.text_size if sources.text_size else 1.0
    draw = random.Random(config.seed + 1)

    def sample(advance: Callable[[int], None]) -> Iterator[str]:
        held = 0
        for split, part in _drawn(config, sources, explicit):
            advance(sources.done)
            if split == "train" and (draw.random() < chance or not held):
                yield part.text
                held += len(part.text)
                if held >= wanted:
                    return

    with byte_bar("tokenizer", sources.total, show=progress) as advance:
        return train_bpe(sample(advance), config.vocab)


def _drawn(config: PrepareConfig, sources: Sources, explicit: bool) -> Iterator[tuple[str, Part]]:
    """Parts with their split: drawn twice as often as wanted, then held to the wanted share, to come close to it."""
    draw = random.Random(config.seed)
    fraction = 0.0 if explicit else config.validation_fraction
    total = kept = 0
    for part in sources.parts():
        size = len(part.text)
        total += size
        drawn = part.first and draw.random() < 2 * fraction
        if drawn and part.last and kept + size <= fraction * total:
            kept += size
            yield "validation", part
        else:
            yield "train", part


def _assigned(
    config: PrepareConfig, sources: Sources, validation: Sources | None, advance: Callable[[int], None]
) -> Iterator[tuple[str, Part]]:
    for split, part in _drawn(config, sources, validation is not None):
        yield split, part
        advance(sources.done)
    if validation is not None:
        for part in validation.parts():
            yield "validation", part
            advance(sources.total + validation.done)


def _batches(parts: Iterator[tuple[str, Part]]) -> Iterator[tuple[str, list[Part]]]:
    held: dict[str, list[Part]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for split, part in parts:
        held[split].append(part)
        sizes[split] += len(part.text)
        if sizes[split] >= BATCH_TEXT or len(held[split]) >= BATCH_PARTS:
            yield split, held[split]
            held[split], sizes[split] = [], 0
    for split in SPLITS:
        if held[split]:
            yield split, held[split]


def _meta(
    config: PrepareConfig, tokenizer: Tokenizer, writers: dict[str, SplitWriter], *, explicit: bool
) -> dict[str, Any]:
    train, validation = writers["train"], writers["validation"]
    tokens = train.tokens + validation.tokens
    totals = {name: getattr(train, name) + getattr(validation, name) for name in ("documents", "bytes", "words")}
    border, moved = train.tokens, {"documents": 0, "bytes": 0, "words": 0}
    fraction = config.validation_fraction
    if not explicit and fraction and validation.bytes < fraction / 2 * totals["bytes"]:
        border, moved = _tail(train, int(fraction * totals["bytes"]) - validation.bytes, tokenizer)
    held = {name: getattr(validation, name) + moved[name] for name in totals}
    kept = {name: totals[name] - held[name] for name in totals}
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "tokenizer": config.tokenizer or ("bytes" if config.vocab is None else "bpe"),
        "vocab_size": tokenizer.vocab_size,
        "end_id": tokenizer.end_id,
        "spans": "spans" in train.paths,
        "tokens": tokens,
        **totals,
        "splits": {
            "train": {"start": 0, "end": border, "tokens": border, **kept},
            "validation": {"start": border, "end": tokens, "tokens": tokens - border, **held},
        },
        "hash": train.hashes["tokens"].hexdigest(),
        "hashes": {
            **{f"{kind}.bin": digest.hexdigest() for kind, digest in train.hashes.items()},
            "tokenizer.json": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        },
        "config": config.to_dict(),
    }


def _tail(train: SplitWriter, wanted: int, tokenizer: Tokenizer) -> tuple[int, dict[str, int]]:
    """Where the last `wanted` bytes of the training text begin, at the start of a document if one is near."""
    tokens = FileSlices(train.paths["tokens"], token_dtype(tokenizer.vocab_size), train.tokens)
    counts = train.counts
    if counts is not None:
        border = tail(lambda start, stop: counts.lengths[tokens[start:stop]], train.tokens, wanted)
    else:
        spans = FileSlices(train.paths["spans"], np.dtype(("<u4", 2)), train.tokens)
        border = tail(lambda start, stop: spans[start:stop][:, 0], train.tokens, wanted)
    borders = np.memmap(train.paths["documents"], dtype="<i8", mode="r")[: train.documents + 1]
    place = int(np.searchsorted(borders, border))
    near = [int(each) for each in borders[max(0, place - 1) : place + 1] if 0 < each < train.tokens]
    near = [each for each in near if abs(each - border) <= (train.tokens - border) / 2]
    border = min(near, key=lambda each: abs(each - border), default=border)
    documents = len(borders) - int(np.searchsorted(borders, border, side="right"))
    if counts is not None:
        before = int(tokens[border - 1 : border][0]) if border else None
        size, words = counts.count(tokens.since(border), before)
    else:
        blocks = range(border, train.tokens, AT_ONCE)
        size, words = sum(spans[at : at + AT_ONCE].sum(axis=0, dtype=np.int64) for at in blocks)
    return border, {"documents": documents, "bytes": int(size), "words": int(words)}


def _move_into_place(folder: Path, writer: SplitWriter, tokenizer: Tokenizer, meta: dict[str, Any]) -> None:
    """meta.json goes first and comes last: a folder that was left in between does not pass for a whole one."""
    for path in writer.paths.values():
        push_to_disk(path)
    (folder / "meta.json").unlink(missing_ok=True)
    (folder / "spans.bin").unlink(missing_ok=True)
    for kind, path in writer.paths.items():
        os.replace(path, folder / f"{kind}.bin")
    tokenizer.save(folder / "tokenizer.json")
    write_json(folder / "meta.json", meta)
