"""Numbers at the ends of their range: see numbers.py."""

from __future__ import annotations

import pytest
import torch

import trainshort as ts
from tests.ops import numbers
from tests.ops.cases import BACKENDS, random_case

backends = pytest.mark.parametrize("backend", BACKENDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@backends
@dtypes
@pytest.mark.parametrize("name", numbers.BEYOND)
def test_queries_far_beyond_the_keys(name: str, dtype: torch.dtype, backend: str) -> None:
    for far in numbers.FAR:
        numbers.check_far_queries(backend, name, far, dtype)


@backends
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("slope", numbers.STEEP)
def test_steep_slopes(slope: float, causal: bool, backend: str) -> None:
    numbers.check_steep_slope(backend, slope, causal, torch.float32)


@backends
@dtypes
@pytest.mark.parametrize("name", numbers.BLIND)
def test_what_stands_in_queries_that_see_nothing(name: str, dtype: torch.dtype, backend: str) -> None:
    numbers.check_blind_queries(backend, name, dtype)


@backends
@pytest.mark.parametrize("name", numbers.HIDDEN)
def test_values_that_others_do_not_see(name: str, backend: str) -> None:
    numbers.check_hidden_keys(backend, name, torch.float32)


@backends
@pytest.mark.parametrize("slope", [2.0**65, 1e30, float("inf"), float("nan"), 0.0, -1.0])
def test_slopes_out_of_range_are_refused(slope: float, backend: str) -> None:
    case = random_case(slopes=torch.tensor([0.5, slope, 0.1]))
    with pytest.raises(ValueError, match=r"slopes must be positive and at most 2\^64, got"):
        case.attend(backend)


@pytest.mark.parametrize("start", [2**63, -(2**70)])
def test_a_start_that_is_no_position(start: int) -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="query_start must lie between"):
        ts.alibi_attention(q, q, q, query_start=start)
