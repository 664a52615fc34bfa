"""The files of one split while it grows: tokens, where documents end, and spans where they are needed."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from trainshort.data.counts import Counts
from trainshort.data.encode import Encoded

KINDS = ("tokens", "documents", "spans")
WRITE_BYTES = 2**22


class SplitWriter:
    """Appends batches to partial files and counts what is in them; a second split can be put behind the first.

    counts: bytes and words by token; None where each batch brings its spans.
    """

    def __init__(self, folder: Path, split: str, counts: Counts | None) -> None:
        self.counts = counts
        kinds = KINDS if counts is None else KINDS[:2]
        self.paths = {kind: folder / f".{split}.{kind}.partial" for kind in kinds}
        self.files: dict[str, IO[bytes]] = {}
        for kind, path in self.paths.items():
            self.files[kind] = path.open("wb")
        self.hashes = {kind: hashlib.sha256() for kind in kinds}
        self.tokens = self.documents = self.bytes = self.words = 0
        self._last: int | None = None

    def append(self, encoded: Encoded) -> None:
        if not len(encoded.tokens):
            return
        self._write("tokens", encoded.tokens)
        self._write("documents", (encoded.ends + self.tokens).astype("<i8"))
        if self.counts is not None:
            size, words = self.counts.count(encoded.tokens, self._last)
        else:
            assert encoded.spans is not None
            self._write("spans", encoded.spans.astype("<u4"))
            size, words = (int(each) for each in encoded.spans.sum(axis=0, dtype=np.int64))
        self._last = int(encoded.tokens[-1])
        self.tokens += len(encoded.tokens)
        self.documents += len(encoded.ends)
        self.bytes += size
        self.words += words

    def extend(self, other: SplitWriter) -> None:
        """Put the other's files behind these; the counts of each stay its own."""
        other.close()
        for kind, path in other.paths.items():
            with path.open("rb") as file:
                while block := file.read(WRITE_BYTES):
                    array = np.frombuffer(block, dtype="<i8" if kind == "documents" else np.uint8)
                    self._write(kind, array + self.tokens if kind == "documents" else array)
            path.unlink()

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def discard(self) -> None:
        for file in self.files.values():
            with contextlib.suppress(OSError):  # a full disk: what was not written will not be missed
                file.close()
        for path in self.paths.values():
            path.unlink(missing_ok=True)

    def _write(self, kind: str, array: NDArray[np.generic]) -> None:
        self.hashes[kind].update(array.data)
        self.files[kind].write(array.data)
