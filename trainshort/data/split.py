"""Which text is kept for validation: whole documents, drawn by the seed from all of the input.

The text is read once to learn how long its documents are, so that the choice depends on the text and the seed alone:
it is the same for every tokenizer. Where documents are too few or too long to be taken whole, a passage of each long
one is kept instead, at a place drawn by the seed; what stands before and after it stays for training.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainshort.data.sources import Sources
from trainshort.data.text import TextPart

TRAIN, VALIDATION = "train", "validation"
NAMED, DOCUMENTS, PASSAGES, NOTHING = "named sources", "whole documents", "passages", "none"
NEAR = 4096  # characters that an edge of a passage may be moved by, to stand between lines,
PART = 4  # but at most one in so many of its own
LISTED = 20  # sources that meta.json names


@dataclass(frozen=True)
class Choice:
    """Documents for validation by their number in the input, and characters of others: from where to where."""

    how: str
    documents: frozenset[int] = frozenset()
    passages: dict[int, tuple[int, int]] = field(default_factory=dict)
    sources: tuple[str, ...] = ()  # that the chosen documents come from

    def assign(self, parts: Iterable[TextPart]) -> Iterator[tuple[str, TextPart]]:
        """Each part with the split that it belongs to; documents with a passage are cut into three."""
        number, cutter = -1, None
        for part in parts:
            if part.first:
                number += 1
                cutter = _Cutter(self.passages[number]) if number in self.passages else None
            if cutter is not None:
                yield from cutter.cut(part)
            else:
                yield VALIDATION if number in self.documents else TRAIN, part

    def about(self, *, seed: int, asked: float, share: float) -> dict[str, Any]:
        """What meta.json says of it."""
        drawn = self.how in (DOCUMENTS, PASSAGES)
        about: dict[str, Any] = {"how": self.how, "seed": seed if drawn else None, "asked": asked if drawn else None}
        return about | {"share": round(share, 6), "from": list(self.sources)}


def choose(sources: Sources, fraction: float, seed: int, advance: Callable[[int], None]) -> Choice:
    """Read all of the sources, and choose that part of their text."""
    sizes, starts, names = array("q"), list[int](), list[str]()
    for part in sources.parts():
        if part.first:
            if not names or names[-1] != sources.reading:
                starts.append(len(sizes))
                names.append(sources.reading)
            sizes.append(0)
        sizes[-1] += len(part.text)
        advance(sources.done)
    documents, passages = choose_by_size(np.array(sizes, dtype=np.int64), fraction, seed)
    found = sorted({bisect_right(starts, number) - 1 for number in (*documents, *passages)})
    how = PASSAGES if passages else DOCUMENTS if documents else NOTHING
    return Choice(how, documents, passages, tuple(names[each] for each in found[:LISTED]))


def choose_by_size(
    sizes: NDArray[np.int64], fraction: float, seed: int
) -> tuple[frozenset[int], dict[int, tuple[int, int]]]:
    """Numbers of whole documents and, where they are less than half of what is wanted, passages of the others."""
    random = np.random.Generator(np.random.PCG64([seed, len(sizes)]))
    total = int(sizes.sum())
    wanted = fraction * total
    order = random.permutation(len(sizes))
    taken: set[int] = set()
    kept = 0
    for number in order[sizes[order] <= wanted]:
        if kept + sizes[number] <= wanted:
            taken.add(int(number))
            kept += int(sizes[number])
        if kept > 0.99 * wanted:
            break
    if kept < wanted / 2:  # one document that is too long, if it is not much too long
        fitting = order[kept + sizes[order] <= min(2 * wanted, total - wanted)]
        if another := [int(number) for number in fitting if int(number) not in taken][:1]:
            taken.update(another)
            kept += int(sizes[another[0]])
    if kept >= wanted / 2:
        return frozenset(taken), {}
    rest = [number for number in range(len(sizes)) if number not in taken]
    share = (wanted - kept) / max(1, int(sizes[rest].sum()))
    passages = {}
    for number in rest:
        length = int(share * sizes[number])
        if length:
            start = int(random.integers(0, sizes[number] - length + 1))
            passages[number] = (start, start + length)
    return frozenset(taken), passages


class _Cutter:
    """Cuts a passage out of a document that comes in parts: before it, the passage, and after it."""

    def __init__(self, passage: tuple[int, int]) -> None:
        self.edges = list(passage)
        self.near = min(NEAR, (passage[1] - passage[0]) // PART)
        self.place = 0  # of the part, in the document
        self.split, self.begun = TRAIN, False

    def cut(self, part: TextPart) -> Iterator[tuple[str, TextPart]]:
        at = 0
        while self.edges and self.edges[0] < self.place + len(part.text):
            edge = self.edges[0] - self.place
            edge = max(at, _line_after(part.text, edge, self.near) if edge > 0 else 0)
            if edge == len(part.text):
                break  # the next part begins with it
            yield from self._piece(part.text[at:edge], ends=True)
            at = edge
            self.edges.pop(0)
            self.split = VALIDATION if self.split == TRAIN else TRAIN
        yield from self._piece(part.text[at:], ends=part.last)
        self.place += len(part.text)

    def _piece(self, text: str, *, ends: bool) -> Iterator[tuple[str, TextPart]]:
        if text or (ends and self.begun):
            yield self.split, TextPart(text, not self.begun, ends)
            self.begun = not ends


def _line_after(text: str, place: int, near: int) -> int:
    """Where the next line begins, or the next space stands, if one is so near; else the place itself."""
    line = text.find("\n", place, place + near)
    if line >= 0:
        return line + 1
    space = text.find(" ", place, place + near)
    return space if space >= 0 else place
