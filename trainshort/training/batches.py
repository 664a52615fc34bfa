"""Which tokens each step sees: a function of the seed and the step alone, so that a run can go on from any step.

The text is cut into windows of the training length. An epoch goes through all of them once, in an order and with
a shift of its own; a step takes the next few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100  # a target that does not count
BORDERS_AT_ONCE = 64  # borders are padded to a multiple, so that compiled code sees few shapes


@dataclass(frozen=True)
class Batch:
    """inputs, targets: int64 [rows, T]; cu_seqlens: int32, if documents stay apart.

    count: of the targets that count, here and in the rows of the same batch that other processes have.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    count: int

    def of_tokens(self, own: slice) -> Batch:
        """The same rows, with some of their tokens. Borders stay those of whole rows."""
        return replace(self, inputs=self.inputs[:, own], targets=self.targets[:, own])

    def to(self, device: torch.device) -> Batch:
        """A copy there; to a GPU, one that nothing has to wait for before it is used."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        borders = None if self.cu_seqlens is None else moved(self.cu_seqlens)
        return Batch(moved(self.inputs), moved(self.targets), borders, self.count)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Say that work on this stream reads it: its memory is not given to others before that is done."""
        for tensor in (self.inputs, self.targets, self.cu_seqlens):
            if tensor is not None:
                tensor.record_stream(stream)


class Batches:
    """Windows of `length` tokens. With `borders` (and the token that ends a document) documents stay apart."""

    def __init__(
        self,
        tokens: NDArray[np.unsignedinteger],
        length: int,
        *,
        seed: int = 0,
        borders: NDArray[np.int64] | None = None,
        end_id: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
        self.borders, self.end_id, self.vocab_size = borders, end_id, vocab_size
        self.windows = (len(tokens) - 1) // length
        if self.windows < 1:
            raise ValueError(
                f"the training text has {len(tokens):,} tokens, and one sequence needs {length + 1:,} "
                "(length + 1): use a shorter length or more text"
            )
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)
        self._shift = 0

    def starts(self, first: int, count: int) -> list[int]:
        """Where the sequences number first, first + 1, ... of the run start in the tokens."""
        found = []
        for number in range(first, first + count):
            epoch, place = divmod(number, self.windows)
            if epoch != self._epoch:
                random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
                self._order = random.permutation(self.windows)
                self._shift = int(random.integers(0, len(self.tokens) - self.windows * self.length))
                self._epoch = epoch
            found.append(self._shift + int(self._order[place]) * self.length)
        return found

    def batch(self, starts: list[int], *, of: list[int] | None = None) -> Batch:
        """The windows that start there: a row each, or all in one row with borders. of: all windows of the batch, if
        these are the ones of this process."""
        count = self.count(starts if of is None else of)
        windows = np.stack([np.asarray(self.tokens[at : at + self.length + 1]) for at in starts]).astype(np.int64)
        if self.vocab_size is not None and (highest := int(windows.max())) >= self.vocab_size:
            raise ValueError(
                f"the data has token {highest}, and its vocabulary ends at {self.vocab_size - 1}: it is damaged; run "
                "prepare again"
            )
        inputs, targets = torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
        if self.borders is None:
            return Batch(inputs, targets, None, count)
        # What begins a document cannot be told from the one before it.
        assert self.end_id is not None
        targets[inputs == self.end_id] = IGNORED
        places = self._borders(starts)
        return Batch(inputs.view(1, -1), targets.view(1, -1), torch.from_numpy(places), count)

    def count(self, starts: list[int]) -> int:
        """The targets that count in the windows that start there."""
        whole = len(starts) * self.length
        if self.borders is None:
            return whole
        ends = (np.count_nonzero(self.tokens[at : at + self.length] == self.end_id) for at in starts)
        return whole - int(sum(ends))

    def _borders(self, starts: list[int]) -> NDArray[np.int32]:
        assert self.borders is not None
        places: list[NDArray[np.int64]] = []
        for row, start in enumerate(starts):
            first, stop = np.searchsorted(self.borders, [start + 1, start + self.length])
            inside = np.asarray(self.borders[first:stop]) - start
            places.append(np.concatenate([[0], inside]) + row * self.length)
        end = len(starts) * self.length
        found = np.concatenate([*places, [end]])
        padding = -len(found) % BORDERS_AT_ONCE  # empty documents at the end
        return np.concatenate([found, np.full(padding, end)]).astype(np.int32)
