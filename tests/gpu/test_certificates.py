"""Certificates by the million on the GPU: what the kernels skip, forward, backward and in decoding, in float64.

Thirty-two calls of each of a dozen seeds: some two million query rows, a million at least. How many were compared and
the worst shares of the tolerance stand in the log beside the test's name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.ops.certificates import FLOAT64_NOISE, describe, unvisited_mass
from tests.ops.dense import Case, dense
from tests.ops.generators import cases
from tests.ops.triton.interpreter import kept_by_both

LENGTHS = (1024, 997)


def is_decoding(case: Case) -> bool:
    return case.causal and case.cu_seqlens is None and case.q.shape[2] <= 8


class Worst:
    """The largest share of the tolerance seen so far, and of which call."""

    def __init__(self) -> None:
        self.share, self.by = 0.0, ""

    def take(self, share: float, case: Case) -> None:
        if not share <= self.share:  # NaN is the worst of all
            self.share, self.by = share, describe(case)


@pytest.mark.parametrize("seed", range(12))
def test_certificates_counted(seed: int, record_property: Callable[[str, object], None]) -> None:
    """The forward pass skips at most half of the tolerance, the backward pass all of it, decoding all of it."""
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    length = LENGTHS[seed % 2]
    worst = {"forward": Worst(), "backward": Worst(), "decoding": Worst()}
    rows = 0
    for case in itertools.islice(cases(500 + seed, "cuda", (dtype,), (length, length)), 32):
        if case.may_skip <= 0.0:
            continue
        weights = dense(case)[1]
        for name, kept in zip(("forward", "backward"), kept_by_both(case), strict=True):
            worst[name].take(float(weights.masked_fill(kept, 0.0).sum(-1).max()) / case.may_skip, case)
        rows += case.q.shape[:3].numel()
        if is_decoding(case) and case.key_norms is not None and float(case.may_skip) > 1e-6:
            # Seen from the output, in float32: a weight that this can't hold counts as skipped.
            wide = replace(case, q=case.q.float(), k=case.k.float(), v=case.v.float())
            worst["decoding"].take(float(unvisited_mass(wide, "triton", 64).max()) / case.may_skip, case)
    record_property("rows", rows)
    for name, found in worst.items():
        record_property(name, found.share)
    told = {name: (found.share, found.by) for name, found in worst.items()}
    assert worst["forward"].share <= 0.5 + FLOAT64_NOISE, told["forward"]
    assert worst["backward"].share <= 1.0 + FLOAT64_NOISE, told["backward"]
    assert worst["decoding"].share <= 1.0 + FLOAT64_NOISE, told["decoding"]
    assert rows > 100_000
