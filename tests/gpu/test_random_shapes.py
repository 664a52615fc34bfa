"""Two hundred random shapes and features: output and every gradient agree with float64 dense attention.

Sixteen kinds, each of which compiles its kernels once or twice; its shapes follow from a seed.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import KINDS, random_gpu_case
from tests.ops.triton.rounding import KernelJudge

SHAPES = 13  # of each kind


@pytest.mark.parametrize("name", KINDS)
def test_random_shapes(name: str) -> None:
    failures = []
    for seed in range(SHAPES):
        case = random_gpu_case(name, seed)
        try:
            KernelJudge(case).check(case.run("triton"))
        except AssertionError as error:
            failures.append(f"seed {seed}, q {list(case.q.shape)}, k {list(case.k.shape)}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", KINDS)
def test_the_same_bits_every_time(name: str) -> None:
    """No atomics, no order of arrival: output and gradients repeat to the last bit."""
    for seed in (0, 1):
        case = random_gpu_case(name, seed)
        first = case.run("triton")
        for _ in range(3):
            torch.empty(2**24, device="cuda").fill_(float("nan"))  # what memory held before does not count
            for key, tensor in case.run("triton").items():
                assert torch.equal(tensor, first[key]), key
