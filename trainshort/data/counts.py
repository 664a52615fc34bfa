"""How many bytes and words a span of tokens holds, exactly, without decoding it.

A word is what `bytes.split()` gives: a run of bytes without ASCII white space. It is counted where it starts, so the
counts of adjacent spans add up to the count of both. The end of a document has no bytes, and separates words.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

SPACE = np.zeros(256, dtype=bool)
SPACE[list(b" \t\n\r\x0b\x0c")] = True
AT_ONCE = 2**20  # tokens: keeps the memory of long spans flat


class Tokens(Protocol):
    """An array, or a file that is read a slice at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> NDArray[np.unsignedinteger]: ...


class Counts:
    """Tables by token: how long it is, how many words start inside it, and what its first and last bytes are."""

    def __init__(self, token_bytes: list[bytes]) -> None:
        size = len(token_bytes)
        lengths = [len(each) for each in token_bytes]
        self.lengths = np.array(lengths, dtype=np.min_scalar_type(max(lengths)))  # small tables stay in the cache
        self.inside = np.zeros(size, dtype=self.lengths.dtype)
        self.starts = np.zeros(size, dtype=bool)  # its first byte is part of a word
        self.splits = np.ones(size, dtype=bool)  # what follows it starts a word: it ends in a space, or has no bytes
        for index, each in enumerate(token_bytes):
            if each:
                space = SPACE[np.frombuffer(each, dtype=np.uint8)]
                self.inside[index] = np.count_nonzero(space[:-1] & ~space[1:])
                self.starts[index], self.splits[index] = not space[0], space[-1]
        self._has_inside = bool(self.inside.any())
        self._plain = token_bytes == [*(bytes([byte]) for byte in range(256)), b""]

    def count(self, tokens: Tokens, before: int | None) -> tuple[int, int]:
        """Bytes and words of the tokens; `before` is the token in front of them, None at the start of the text."""
        total_bytes = total_words = 0
        split_before = True if before is None else bool(self.splits[before])
        for start in range(0, len(tokens), AT_ONCE):
            part = np.asarray(tokens[start : start + AT_ONCE])
            if self._plain:
                splits, size = _plain_bytes(part)
                total_words += int(np.count_nonzero(splits[:-1] > splits[1:])) + int(split_before and not splits[0])
                total_bytes += size
                split_before = bool(splits[-1])
                continue
            splits, starts = self.splits[part], self.starts[part]
            total_words += int(np.count_nonzero(starts[1:] & splits[:-1])) + int(starts[0] and split_before)
            if self._has_inside:
                total_words += int(self.inside[part].sum(dtype=np.int64))
            total_bytes += int(self.lengths[part].sum(dtype=np.int64))
            split_before = bool(splits[-1])
        return total_bytes, total_words


def _plain_bytes(tokens: NDArray[np.unsignedinteger]) -> tuple[NDArray[np.bool_], int]:
    """For bytes: which tokens separate words, and how many are bytes. Comparisons run ten times as fast as tables."""
    end = tokens == 256
    splits = tokens - tokens.dtype.type(9) < 5  # \t \n \x0b \x0c \r; smaller ones wrap around
    splits |= tokens == 32
    splits |= end
    return splits, len(tokens) - int(np.count_nonzero(end))
