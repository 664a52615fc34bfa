"""Parts of documents to tokens, a batch at a time: with numpy for bytes, with the tokenizer for all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainshort.common.tokenizer_json import package_errors
from trainshort.data.counts import SPACE
from trainshort.data.meta import DTYPES, dtype_name
from trainshort.data.text import TextPart, small_pieces
from trainshort.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer


@dataclass(frozen=True)
class Encoded:
    """tokens: of all parts, with an end after each document; ends: the places behind these ends.

    spans: bytes and words of each token, uint32 [tokens, 2], where they do not follow from the tokens.
    """

    tokens: NDArray[np.unsignedinteger]
    ends: NDArray[np.int64]
    spans: NDArray[np.uint32] | None = None


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(DTYPES[dtype_name(vocab_size)])


def first_tokens(encoded: Encoded, count: int, end_id: int) -> Encoded:
    """At most so many; a document that is cut ends with the last of them."""
    if count >= len(encoded.tokens):
        return encoded
    tokens, ends = encoded.tokens[:count].copy(), encoded.ends[encoded.ends < count]
    spans = None if encoded.spans is None else encoded.spans[:count].copy()
    if count:
        tokens[-1] = end_id
        ends = np.append(ends, np.int64(count))
        if spans is not None:
            spans[-1] = 0  # the end stands for no text
    return Encoded(tokens, ends, spans)


def encode(tokenizer: Tokenizer, parts: Sequence[TextPart], *, spans: bool = False) -> Encoded:
    """spans: also say how many bytes and words each token stands for."""
    if isinstance(tokenizer, ByteTokenizer):
        return _bytes(parts)
    assert isinstance(tokenizer, FileTokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    pieces: list[NDArray[np.unsignedinteger]] = []
    tables, ends, place = [], [], 0
    for part in parts:
        with package_errors(tokenizer.where, "this tokenizer fails on a text"):
            if spans:
                encoding = tokenizer.backend.encode(part.text, add_special_tokens=False)
                pieces.append(np.array(encoding.ids, dtype=dtype))
                tables.append(_spans(part, encoding.offsets))
                place += len(pieces[-1])
            else:
                for text in small_pieces(part.text):  # an encoding takes a hundred times the memory of its text
                    (encoding,) = tokenizer.backend.encode_batch_fast([text], add_special_tokens=False)
                    pieces.append(np.array(encoding.ids, dtype=dtype))
                    place += len(pieces[-1])
        if part.last:
            pieces.append(np.array([tokenizer.end_id], dtype=dtype))
            place += 1
            ends.append(place)
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype)
    return Encoded(tokens, np.array(ends, dtype=np.int64), np.concatenate(tables) if spans else None)


def _bytes(parts: Sequence[TextPart]) -> Encoded:
    pieces: list[bytes] = []
    ends, place = [], 0
    for part in parts:
        piece = part.text.encode("utf-8")
        pieces.append(piece)
        place += len(piece)
        if part.last:
            pieces.append(b"\n")
            place += 1
            ends.append(place)
    tokens = np.frombuffer(b"".join(pieces), dtype=np.uint8).astype("<u2")
    behind = np.array(ends, dtype=np.int64)
    tokens[behind - 1] = ByteTokenizer.end_id
    return Encoded(tokens, behind)


def _spans(part: TextPart, offsets: Sequence[tuple[int, int]]) -> NDArray[np.uint32]:
    """Each token stands for the text from the end of the one before it to its own end; the last takes the rest."""
    text = np.frombuffer(part.text.encode("utf-32-le"), dtype="<u4")
    sizes = 1 + (text >= 0x80).astype(np.int64) + (text >= 0x800) + (text >= 0x10000)
    space = (text < 128) & SPACE[np.minimum(text, 127)]
    begins = ~space
    begins[1:] &= space[:-1]
    if len(begins) and not part.first:
        begins[0] = False  # it goes on from the part before, which was cut in front of a space or inside a word
    sums = np.zeros((len(text) + 1, 2), dtype=np.int64)
    sums[1:, 0], sums[1:, 1] = np.cumsum(sizes), np.cumsum(begins)
    places = np.array([stop for _, stop in offsets], dtype=np.int64)
    if part.last:
        places = np.append(places, len(text))
    if len(places):
        places = np.maximum.accumulate(places)
        places[-1] = len(text)
        if part.last and len(places) > 1:
            places[-2] = len(text)
    return np.diff(sums[np.concatenate([[0], places])], axis=0).astype(np.uint32)
