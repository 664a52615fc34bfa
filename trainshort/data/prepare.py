"""From sources to a folder of tokens: tokens.bin and documents.bin, tokenizer.json, and meta.json at the very end.

tokens.bin holds the training documents and then those for validation; meta.json has the border, and says how they
were chosen. A prepare that fails leaves the disk as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainshort.common.files import free_space, is_full, push_to_disk, remove_partials, write_json
from trainshort.data.config import PrepareConfig
from trainshort.data.counts import Counts
from trainshort.data.encode import first_tokens, token_dtype
from trainshort.data.meta import COUNTS, FILES, FORMAT, VERSION
from trainshort.data.progress import byte_bar
from trainshort.data.sources import HF, Sources, hub_name, load_hub
from trainshort.data.split import LISTED, NAMED, NOTHING, TRAIN, VALIDATION, Choice, choose
from trainshort.data.text import TextPart
from trainshort.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from trainshort.data.workers import encode_all
from trainshort.data.writer import SplitWriter

BATCH_TEXT = 2**20  # characters
BATCH_PARTS = 4096
SPLITS = (TRAIN, VALIDATION)


def prepare(config: PrepareConfig, *, progress: bool = True) -> Path:
    """Write the folder that the config asks for; returns its path."""
    folder = Path(config.out)
    if (folder / "meta.json").exists() and not config.overwrite:
        raise FileExistsError(
            f"{folder} holds prepared data already: choose another folder with out (--out), or replace it with "
            "overwrite (--overwrite)"
        )
    sources, validation = _sources(config)
    choice = _choice(config, sources, validation, progress)
    tokenizer = _tokenizer(config, sources, choice, progress)
    if tokenizer.end_id is None:
        raise ValueError(
            f"{config.tokenizer} has no token of a known name to end documents with: name one with --end-token"
        )
    table = tokenizer.token_bytes()
    counts = None if table is None else Counts(table)
    writers: dict[str, SplitWriter] = {}
    with _new_folder(folder):
        remove_partials(folder)
        try:
            for split in SPLITS:
                writers[split] = SplitWriter(folder, split, counts)
            writers[TRAIN]._write("documents", np.zeros(1, dtype="<i8"))
            total = sum(each.total for each in (sources, validation) if each)
            with byte_bar("tokens", total, show=progress) as advance:
                train = writers[TRAIN]

                def room() -> int | None:
                    return None if config.train_tokens is None else config.train_tokens - train.tokens

                batches = _batches(_assigned(choice, sources, validation, advance, lambda: room() == 0))
                for split, encoded in encode_all(batches, tokenizer, spans=counts is None, workers=config.workers):
                    left = room() if split == TRAIN else None
                    writers[split].append(encoded if left is None else first_tokens(encoded, left, tokenizer.end_id))
            if not writers[TRAIN].tokens:
                raise ValueError(f"{' '.join(config.sources)}: no text in it")
            writers[TRAIN].extend(writers[VALIDATION])
            writers[TRAIN].close()
            meta = _meta(config, tokenizer, writers, choice)
            meta["links_left_out"] = sum(each.links_left_out for each in (sources, validation) if each)
            _move_into_place(folder, writers[TRAIN], tokenizer, meta)
        except Exception as error:
            if not is_full(error):
                raise
            raise RuntimeError(
                f"{folder}: no space left on the disk ({free_space(folder)}); a token takes 2 bytes, or 4 with more "
                "than 65,536 of them. Nothing there was changed: free some space and run it again"
            ) from error
        finally:
            for writer in writers.values():
                writer.discard()
    return folder


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Make the folder; if the block fails, those that were not there before are not there afterwards either."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for name in (*FILES, "meta.json") if folder in made else ():  # it may have failed between two of them
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else has put something into it
            for each in made:
                each.rmdir()
        raise


def _sources(config: PrepareConfig) -> tuple[Sources, Sources | None]:
    def make(names: tuple[str, ...]) -> Sources:
        return Sources(names, config.text_field, config.pattern, config.document_start, config.errors)

    names = config.validation
    if not names and config.validation_fraction > 0:  # data sets often bring a validation split of their own
        hub = [name for name in config.sources if name.startswith(HF) and ":" not in name.removeprefix(HF)]
        if len(hub) == len(config.sources) and all("validation" in load_hub(name) for name in hub):
            names = tuple(f"{HF}{hub_name(name)[0]}:validation" for name in hub)
    sources, validation = make(config.sources), make(names) if names else None
    if validation is not None:
        sources.leave_out(validation)
    return sources, validation


def _choice(config: PrepareConfig, sources: Sources, validation: Sources | None, progress: bool) -> Choice:
    if validation is not None:
        return Choice(NAMED, sources=tuple(item.name for item in validation.items[:LISTED]))
    if not config.validation_fraction:
        return Choice(NOTHING)
    with byte_bar("documents", sources.total, show=progress) as advance:
        return choose(sources, config.validation_fraction, config.seed, advance)


def _tokenizer(config: PrepareConfig, sources: Sources, choice: Choice, progress: bool) -> Tokenizer:
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer, end_token=config.end_token)
    if config.vocab is None:
        return ByteTokenizer()
    wanted = config.bpe_sample_mb * 2**20
    chance = wanted / sources.text_size if sources.text_size else 1.0
    draw = random.Random(config.seed + 1)

    def sample(advance: Callable[[int], None]) -> Iterator[str]:
        held = 0
        for split, part in choice.assign(sources.parts()):
            advance(sources.done)
            if split == TRAIN and (draw.random() < chance or not held):
                yield part.text
                held += len(part.text)
                if held >= wanted:
                    return

    with byte_bar("tokenizer", sources.total, show=progress) as advance:
        return train_bpe(sample(advance), config.vocab)


def _assigned(
    choice: Choice,
    sources: Sources,
    validation: Sources | None,
    advance: Callable[[int], None],
    enough: Callable[[], bool],
) -> Iterator[tuple[str, TextPart]]:
    """Every part with its split. Once there is enough to train on, only what is for validation."""
    for split, part in choice.assign(sources.parts()):
        if split == VALIDATION or not enough():
            yield split, part
        elif validation is not None:
            break  # nothing that is left in these sources is wanted
        advance(sources.done)
    if validation is not None:
        for part in validation.parts():
            yield VALIDATION, part
            advance(sources.total + validation.done)


def _batches(parts: Iterator[tuple[str, TextPart]]) -> Iterator[tuple[str, list[TextPart]]]:
    held: dict[str, list[TextPart]] = {split: [] for split in SPLITS}
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
    config: PrepareConfig, tokenizer: Tokenizer, writers: dict[str, SplitWriter], choice: Choice
) -> dict[str, Any]:
    train, validation = writers[TRAIN], writers[VALIDATION]
    tokens = train.tokens + validation.tokens
    held, kept = ({name: getattr(each, name) for name in COUNTS} for each in (validation, train))
    totals = {name: held[name] + kept[name] for name in COUNTS}
    share = held["bytes"] / max(1, totals["bytes"])
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
            TRAIN: {"start": 0, "end": train.tokens, "tokens": train.tokens, **kept},
            VALIDATION: {"start": train.tokens, "end": tokens, "tokens": validation.tokens, **held},
        },
        "validation": choice.about(seed=config.seed, asked=config.validation_fraction, share=share),
        "hash": train.hashes["tokens"].hexdigest(),
        "hashes": {
            **{f"{kind}.bin": digest.hexdigest() for kind, digest in train.hashes.items()},
            "tokenizer.json": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        },
        "config": config.to_dict(),
    }


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
