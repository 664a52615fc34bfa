"""Text cut into parts: of a size that fits in memory, at places where no tokenizer is disturbed."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import IO, NamedTuple

READ_BYTES = 2**20  # bytes read at once, and about the longest part
SMALL = 2**14  # characters


class TextPart(NamedTuple):
    """A piece of a document: the first and the last one say so."""

    text: str
    first: bool
    last: bool


def parts_of_documents(texts: Iterable[str]) -> Iterator[TextPart]:
    """Each text is a document. Empty ones are left out."""
    for text in texts:
        if text:
            yield from _pieces(text)


def parts_of_text(stream: IO[bytes], name: str, errors: str, start: re.Pattern[str] | None) -> Iterator[TextPart]:
    """A text file is one document, or several where `start` matches their first lines."""
    blocks = _decoded(stream, name, errors)
    yield from _one_document(blocks) if start is None else parts_of_texts(blocks, start)


def parts_of_texts(texts: Iterable[str], start: re.Pattern[str]) -> Iterator[TextPart]:
    """Texts are joined, and a document starts at each line that `start` matches."""
    held, first, looked = "", True, False  # looked: the first line of what is held is known to start a document
    for text in texts:
        held += text
        if len(held) < READ_BYTES:
            continue
        documents, held = _split_lines(held, held.rfind("\n") + 1, start, looked or first)
        for document in documents:
            yield from _pieces(document, first)
            first = True
        looked = True
        if len(held) >= READ_BYTES and (line := held.rfind("\n") + 1):  # a long document: give out what is known
            yield from _pieces(held[:line], first, ends=False)
            held, first, looked = held[line:], False, False
        elif len(held) >= 2 * READ_BYTES:  # a long line too: what is left of it starts nothing
            cut = _cut(held, READ_BYTES)
            yield TextPart(held[:cut], first, False)
            held, first = held[cut:], False
    documents, held = _split_lines(held, len(held), start, looked or first)
    for document in [*documents, held]:
        if document or not first:
            yield from _pieces(document, first)
        first = True


def _split_lines(text: str, known: int, start: re.Pattern[str], begun: bool) -> tuple[list[str], str]:
    """The documents that end within the text, and the rest. Only whole lines, up to `known`, are looked at."""
    cuts = [match.start() for match in start.finditer(text, 0, known) if match.start() > 0 or not begun]
    borders = [0, *cuts]
    return [text[a:b] for a, b in pairwise(borders)], text[borders[-1] :]


def _one_document(blocks: Iterator[str]) -> Iterator[TextPart]:
    held, first = "", True
    for block in blocks:
        held += block
        if len(held) >= 2 * READ_BYTES:
            cut = _cut(held, READ_BYTES)
            yield TextPart(held[:cut], first, False)
            held, first = held[cut:], False
    if held or not first:
        yield TextPart(held, first, True)


def _pieces(text: str, first: bool = True, ends: bool = True) -> Iterator[TextPart]:
    place = 0
    while len(text) - place >= 2 * READ_BYTES:
        cut = place + _cut(text[place : place + 2 * READ_BYTES], READ_BYTES)
        yield TextPart(text[place:cut], first, False)
        place, first = cut, False
    yield TextPart(text[place:], first, ends)


def small_pieces(text: str) -> Iterator[str]:
    """The text in pieces that a byte-level tokenizer makes the same tokens of."""
    place = 0
    while len(text) - place > SMALL:
        cut = place + _cut(text[place : place + SMALL], SMALL)
        yield text[place:cut]
        place = cut
    yield text[place:]


def _cut(text: str, near: int) -> int:
    """In front of the last white space before `near`: byte-level tokenizers never join its two sides."""
    place = max(text.rfind(" ", 1, near), text.rfind("\n", 1, near))
    while place > 0 and text[place - 1].isspace():
        place -= 1
    return place if place > 0 else near


def _decoded(stream: IO[bytes], name: str, errors: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    read = 0
    while True:
        block = stream.read(READ_BYTES)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            byte, place = error.object[error.start], read - pending + error.start
            raise ValueError(
                f"{name}: not UTF-8: byte 0x{byte:02x} at {place:,} ({error.reason}); convert the file, or use "
                "errors='replace' (--errors replace)"
            ) from None
        if text:
            yield text
        if not block:
            return
        read += len(block)
