"""The backend that "auto" chooses on a CPU, and torch's own attention, which it takes where there is no bias."""

from __future__ import annotations

import pytest
import torch

import trainshort as ts
from tests.ops.budget import assert_within_budget
from tests.ops.cases import BACKENDS, random_case

FEATURES: dict[str, dict] = {
    "causal": {"queries": 300},
    "bucket": {"queries": 300, "bias": "bucket"},
    "no_bias": {"queries": 300, "bias": "none"},
    "no_bias_symmetric": {"queries": 300, "bias": "none", "causal": False},
    "no_bias_query_start": {"queries": 40, "keys": 300, "bias": "none", "query_start": 200},
    "no_bias_query_start_by_row": {"queries": 64, "bias": "none", "query_start": torch.tensor([0, 5])},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_auto_is_one_of_them(feature: str) -> None:
    case = random_case(**FEATURES[feature])
    assert ts.backend_for(case.q) in BACKENDS
    assert_within_budget(case.run("auto"), case)
