"""A text file as tokens of one tokenizer, in memory: what can be measured of a model without preparing data for it.

The text has an identity of its own, which does not depend on the tokenizer: models that make other tokens of it are
still tested on the same text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainshort.common.reading import file_size
from trainshort.data.counts import Counts
from trainshort.data.encode import encode, token_dtype
from trainshort.data.sources import standard_library
from trainshort.data.text import TextPart, parts_of_documents
from trainshort.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer

LARGEST = 256 * 2**20  # bytes of a text that is read whole
EMBEDDED = 2**18  # characters of Python's library that are taken where no text is named
EMBEDDED_NAME = "the Python library's source"
_HELP = "a text is a file of UTF-8; trainshort prepare reads other kinds"


@dataclass(frozen=True)
class PlainText:
    """tokens: uint16 or uint32. folder: where the text came from, for people to read."""

    text: str
    tokens: NDArray[np.unsignedinteger]
    tokenizer: Tokenizer
    folder: str
    spans: NDArray[np.uint32] | None = None  # bytes and words of each token, where they do not follow from it

    @cached_property
    def identity(self) -> str:
        """A name for exactly this text, whatever its tokens are."""
        return f"text {hashlib.sha256(self.text.encode('utf-8')).hexdigest()}"

    @cached_property
    def tokenizer_identity(self) -> str:
        return hashlib.sha256(self.tokenizer.to_str().encode("utf-8")).hexdigest()[:16]

    def bytes_of(self, split: str, start: int, end: int) -> int:
        return self._count(start, end)[0]

    def words_of(self, split: str, start: int, end: int) -> int:
        return self._count(start, end)[1]

    def _count(self, start: int, end: int) -> tuple[int, int]:
        if self.spans is not None:
            size, words = self.spans[start:end].sum(axis=0, dtype=np.int64)
            return int(size), int(words)
        return self._counts.count(self.tokens[start:end], int(self.tokens[start - 1]) if start else None)

    @cached_property
    def _counts(self) -> Counts:
        table = self.tokenizer.token_bytes()
        assert table is not None, "otherwise there are spans"
        return Counts(table)


def plain_text(path: str | Path | None, tokenizer: Tokenizer) -> PlainText:
    """The text of a file, or without one the beginning of the source of Python's library."""
    text = embedded_text() if path is None else read_plain(Path(path))
    spans = tokenizer.token_bytes() is None
    tables, pieces = [], [np.empty(0, dtype=token_dtype(tokenizer.vocab_size))]
    for part in parts_of_documents([text]):
        encoded = encode(tokenizer, [TextPart(part.text, part.first, last=False)], spans=spans)
        pieces.append(encoded.tokens)
        if encoded.spans is not None:
            tables.append(encoded.spans)
    where = EMBEDDED_NAME if path is None else str(path)
    return PlainText(text, np.concatenate(pieces), tokenizer, where, np.concatenate(tables) if tables else None)


def read_plain(path: Path) -> str:
    size = file_size(path, _HELP)
    if size > LARGEST:
        raise ValueError(f"{path}: has {size:,} bytes, and at most {LARGEST:,} are read at once; {_HELP}")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise ValueError(f"{path}: not a text: byte 0x{byte:02x} at {error.start:,} is not UTF-8; {_HELP}") from None
    if "\0" in text:
        raise ValueError(f"{path}: not a text: it holds zero bytes; {_HELP}")
    if not text:
        raise ValueError(f"{path}: is empty; name a file with text in it")
    return text


def embedded_text() -> str:
    """Of Python's library, from its first file on, in whole lines."""
    found = ""
    for item in standard_library():
        assert item.path is not None
        found += item.path.read_text(encoding="utf-8")
        if len(found) >= EMBEDDED:
            break
    return found[: found.rfind("\n", 0, EMBEDDED) + 1]


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder; where there is none, the error says why and what to do."""
    path = folder / "tokenizer.json"
    if not path.exists():
        found = "a SentencePiece tokenizer.model, which is not read, and " * (folder / "tokenizer.model").exists()
        raise FileNotFoundError(
            f"{folder} has {found}no tokenizer.json, so no text can be made tokens of this model: put the "
            "tokenizer.json into the folder that save_pretrained of its fast tokenizer in transformers writes"
        )
    return load_tokenizer(path)


def with_special_tokens(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    """At most so many tokens of a text, with what the tokenizer puts around a text, such as [CLS] and [SEP]."""
    if not isinstance(tokenizer, FileTokenizer):
        return tokenizer.encode(text)[:most]
    backend = tokenizer.backend
    encoding = backend.encode(text, add_special_tokens=False)
    encoding.truncate(max(most - backend.num_special_tokens_to_add(False), 0))
    return list(backend.post_process(encoding, None, True).ids)[:most]
