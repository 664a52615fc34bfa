"""Numbers at the ends of their range, in the kernels: see tests/ops/numbers.py."""

from __future__ import annotations

import pytest
import torch

from tests.ops import numbers

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@pytest.mark.parametrize("name", numbers.BEYOND)
def test_queries_far_beyond_the_keys(name: str) -> None:
    for far in (10**3, 10**7):
        numbers.check_far_queries("triton", name, far, torch.float32)


@pytest.mark.slow
@dtypes
@pytest.mark.parametrize("name", numbers.BEYOND)
def test_queries_at_any_distance_from_the_keys(name: str, dtype: torch.dtype) -> None:
    for far in numbers.FAR:
        numbers.check_far_queries("triton", name, far, dtype)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("slope", numbers.STEEP)
def test_steep_slopes(slope: float, causal: bool) -> None:
    numbers.check_steep_slope("triton", slope, causal, torch.float32)


@dtypes
@pytest.mark.parametrize("name", numbers.BLIND)
def test_what_stands_in_queries_that_see_nothing(name: str, dtype: torch.dtype) -> None:
    numbers.check_blind_queries("triton", name, dtype)


@pytest.mark.parametrize("name", numbers.HIDDEN)
def test_values_that_others_do_not_see(name: str) -> None:
    numbers.check_hidden_keys("triton", name, torch.float32)
