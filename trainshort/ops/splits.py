"""How one call is split among threads: by rows of the batch and by heads, which have nothing to do with one another.

Each split is a problem of its own, with a place of its own in the results: whichever thread computes it, they are the
same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainshort.ops import threads
from trainshort.ops.problem import BLOCK, Problem

LEAST_WORK = 2**23  # multiplications: a smaller split is not worth waking a thread for
UNEVEN = 1.25  # how much longer the largest split may take than an even split


class Split(NamedTuple):
    rows: slice  # of the batch
    heads: slice
    keys: slice  # the key heads of these heads

    def of(self, problem: Problem) -> Problem:
        return problem.part(self.rows, self.heads)

    def queries(self, tensor: Tensor) -> Tensor:
        """This part of a tensor [B, H, ...]."""
        return tensor[self.rows, self.heads]

    def key_heads(self, tensor: Tensor) -> Tensor:
        """This part of a tensor [B, Hkv, ...]."""
        return tensor[self.rows, self.keys]


def splits_of(problem: Problem, windows: Tensor | None) -> list[Split]:
    """The splits of one pass over these windows, or over everything."""
    batch, heads, queries, dim = problem.q.shape
    if windows is None or windows.device.type != "cpu":
        keys = problem.k.shape[2]
        elements = queries * keys // 2 if problem.causal and queries == keys else queries * keys
        return split_problem(
            problem, torch.full((batch, heads), float(elements * dim), dtype=torch.float64, device="cpu")
        )
    blocks = (windows[..., 1] - windows[..., 0]).sum(-1).double()
    return split_problem(problem, blocks * (min(BLOCK, queries) * BLOCK * dim))


def split_problem(problem: Problem, work: Tensor) -> list[Split]:
    """The splits of a problem, the largest first; a single one where it is not to be split.

    work: multiplications for each row and head, [B, H].
    """
    batch, heads = problem.q.shape[:2]
    group = heads // problem.k.shape[1]
    whole = [_split(0, batch, 0, heads, group)]
    if problem.q.device.type != "cpu":
        return whole
    count = threads.available()
    even = work.numel() > 0 and bool(work.amax() == work.amin())
    for each in (1,) if even else (2, 4, 8):  # splits for a thread: few, because Python runs in turns
        most = min(each * count, int(work.sum()) // LEAST_WORK)
        if most < 2 or count < 2:
            return whole
        splits = _grid(batch, heads, group, most)
        sizes = [float(split.queries(work).sum()) for split in splits]
        if max(sizes) * count <= UNEVEN * sum(sizes):
            order = sorted(range(len(splits)), key=lambda index: -sizes[index])
            return [splits[index] for index in order]
    return whole


def _grid(batch: int, heads: int, group: int, most: int) -> list[Split]:
    """About so many splits, by heads first: the rows of a head share its bias."""
    kv_heads = heads // group
    step = -(-kv_heads // min(most, kv_heads)) * group
    columns = -(-heads // step)
    rows = -(-batch // max(1, most // columns))
    return [
        _split(row, min(row + rows, batch), head, min(head + step, heads), group)
        for row in range(0, batch, rows)
        for head in range(0, heads, step)
    ]


def _split(row: int, row_end: int, head: int, head_end: int, group: int) -> Split:
    return Split(slice(row, row_end), slice(head, head_end), slice(head // group, head_end // group))
