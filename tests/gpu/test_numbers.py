"""Numbers at the ends of their range, on the GPU: see tests/ops/numbers.py."""

from __future__ import annotations

import pytest
import torch

from tests.ops import numbers

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@dtypes
@pytest.mark.parametrize("name", numbers.BEYOND)
def test_queries_far_beyond_the_keys(name: str, dtype: torch.dtype) -> None:
    for far in numbers.FAR:
        numbers.check_far_queries("triton", name, far, dtype, "cuda")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_steep_slopes(causal: bool) -> None:
    for slope in numbers.STEEP:
        numbers.check_steep_slope("triton", slope, causal, torch.float32, "cuda")


@dtypes
def test_what_stands_in_queries_that_see_nothing(dtype: torch.dtype) -> None:
    for name in numbers.BLIND:
        numbers.check_blind_queries("triton", name, dtype, "cuda")


def test_values_that_others_do_not_see() -> None:
    for name in numbers.HIDDEN:
        numbers.check_hidden_keys("triton", name, torch.float32, "cuda")
