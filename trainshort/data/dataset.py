"""A folder of tokens as prepare left it: memory-mapped, checked, with the bytes and words of any span."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainshort.common.files import sha256
from trainshort.common.reading import file_size
from trainshort.data.counts import Counts
from trainshort.data.meta import DTYPES, read_meta
from trainshort.data.split import DOCUMENTS, NAMED, PASSAGES
from trainshort.data.tokenizer import Tokenizer, load_tokenizer

_HELP = "a folder of tokens is made by prepare: trainshort prepare book.txt --out data"


class TokenData:
    """train and validation: the tokens of each split, uint16 or uint32, on the disk until they are looked at.

    borders: int64 [documents + 1], where documents start in tokens.bin, and where the last one ends.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder}: no such folder; {_HELP}")
        self.meta: dict[str, Any] = read_meta(self.folder / "meta.json", _HELP)
        dtype = DTYPES[self.meta["dtype"]]
        self.tokens: NDArray[np.unsignedinteger] = self._map("tokens.bin", dtype, self.meta["tokens"])
        self.borders: NDArray[np.int64] = self._map("documents.bin", "<i8", self.meta["documents"] + 1)

    @property
    def train(self) -> NDArray[np.unsignedinteger]:
        return self.split("train")

    @property
    def validation(self) -> NDArray[np.unsignedinteger]:
        return self.split("validation")

    def split(self, name: str) -> NDArray[np.unsignedinteger]:
        start, end = self.range_of(name)
        return self.tokens[start:end]

    def range_of(self, split: str) -> tuple[int, int]:
        """Where a split starts and ends in tokens.bin."""
        splits = self.meta["splits"]
        if split not in splits:
            raise ValueError(f"split must be one of {', '.join(splits)}; got {split!r}")
        return splits[split]["start"], splits[split]["end"]

    def borders_of(self, split: str) -> NDArray[np.int64]:
        """Where documents start in a split, counted from its own start, and its end: int64, from 0 on."""
        start, end = self.range_of(split)
        first, stop = np.searchsorted(self.borders, [start, end], side="right")
        inner = self.borders[first:stop]
        borders = np.unique(np.concatenate([[0], inner - start, [end - start]]))
        if borders[0] != 0 or borders[-1] != end - start:  # only where those in the file are not in their order
            raise ValueError(
                f"{self.folder / 'documents.bin'}: documents do not follow each other; run prepare again"
            )
        return borders

    @property
    def vocab_size(self) -> int:
        return int(self.meta["vocab_size"])

    @property
    def end_id(self) -> int:
        return int(self.meta["end_id"])

    @property
    def identity(self) -> str:
        """A short name for exactly this data: it differs if a token, a border or the split differs."""
        parts = [self.meta["hashes"], self.meta["splits"], self.meta["vocab_size"]]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.folder / "tokenizer.json", end_token=self.meta["config"].get("end_token"))
        if (tokenizer.vocab_size, tokenizer.end_id) != (self.vocab_size, self.end_id):
            raise ValueError(
                f"{self.folder / 'tokenizer.json'} has {tokenizer.vocab_size} tokens and ends documents with "
                f"{tokenizer.end_id}, the data was made with {self.vocab_size} and {self.end_id}: it was changed "
                "since; run prepare again"
            )
        return tokenizer

    def bytes_of(self, split: str, start: int = 0, end: int | None = None) -> int:
        """Bytes of text that the tokens start..end of a split stand for."""
        return self.count(split, start, end)[0]

    def words_of(self, split: str, start: int = 0, end: int | None = None) -> int:
        """Words (as bytes.split() has them) that start in the tokens start..end of a split."""
        return self.count(split, start, end)[1]

    def count(self, split: str, start: int = 0, end: int | None = None) -> tuple[int, int]:
        """Bytes and words of the tokens start..end of a split. The counts of adjacent spans add up."""
        low, high = self.range_of(split)
        end = high - low if end is None else end
        if not 0 <= start <= end <= high - low:
            raise ValueError(f"a span of {split} lies in [0, {high - low}], got [{start}, {end}]")
        start, end = low + start, low + end
        if self._spans is not None:
            size, words = self._spans[start:end].sum(axis=0, dtype=np.int64)
            return int(size), int(words)
        before = int(self.tokens[start - 1]) if start else None
        try:
            return self._counts.count(self.tokens[start:end], before)
        except IndexError:
            raise ValueError(
                f"{self.folder / 'tokens.bin'} holds a token beyond its vocabulary of {self.vocab_size}: it is "
                "damaged; run prepare again"
            ) from None

    def verify(self) -> None:
        """Read all of it and compare with what prepare wrote."""
        for name, digest in self.meta["hashes"].items():
            if sha256(self.folder / name) != digest:
                raise ValueError(
                    f"{self.folder / name} is not what prepare wrote (another sha256 than in meta.json): it was "
                    "changed or damaged; restore it, or run prepare again"
                )

    def summary(self) -> str:
        lines = [f"{self.folder}: vocabulary of {self.vocab_size:,} ({self.meta['tokenizer']}), {self.meta['dtype']}"]
        for name, split in self.meta["splits"].items():
            lines.append(
                f"  {name:<10} {split['tokens']:>14,} tokens  {split['bytes']:>14,} bytes  "
                f"{split['words']:>12,} words  {split['documents']:>9,} documents"
            )
        return "\n".join([*lines, *self._about_validation()])

    def _about_validation(self) -> list[str]:
        """How the validation text was chosen, and what was left out of the input."""
        about, lines = self.meta.get("validation", {}), []
        if about.get("how") in (DOCUMENTS, PASSAGES):
            what = "whole documents" if about["how"] == DOCUMENTS else "passages of documents too long to take whole"
            share = f"{about['share']:.1%} of the text ({about.get('asked') or 0:.1%} asked)"
            lines.append(f"  validation: {what}, drawn from all of the input with seed {about.get('seed')}: {share}")
        elif about.get("how") == NAMED:
            lines.append("  validation: the sources that were named for it")
        if self.meta.get("links_left_out"):
            lines.append(f"  left out: links that lead out of their folder: {self.meta['links_left_out']:,}")
        return lines

    @cached_property
    def _counts(self) -> Counts:
        table = self.tokenizer.token_bytes()
        if table is None:
            raise ValueError(f"{self.folder / 'meta.json'}: spans is false, but this tokenizer needs them; {_HELP}")
        return Counts(table)

    @cached_property
    def _spans(self) -> NDArray[np.uint32] | None:
        if not self.meta["spans"]:
            return None
        return self._map("spans.bin", "<u4", 2 * self.meta["tokens"]).reshape(-1, 2)

    def _map(self, name: str, dtype: str, count: int) -> NDArray[Any]:
        path = self.folder / name
        wanted, size = count * np.dtype(dtype).itemsize, file_size(path, _HELP)
        if size != wanted:
            raise ValueError(
                f"{path} has {size:,} bytes, meta.json says {wanted:,}: it was cut or changed; run prepare again"
            )
        if not count:
            return np.empty(0, dtype=dtype)
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
