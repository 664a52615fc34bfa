"""Kernels read and write nothing but what they are given, whatever they do with it."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cases import random_case
from tests.ops.contract.features import feature_case
from tests.ops.contract.places import PLACES
from tests.ops.triton.interpreter import addresses_checked


@pytest.mark.parametrize("feature", ["causal", "gates", "gates_packed", "gates_packed_both_sides",
                                     "gates_left_padding", "gates_query_start_by_row", "borders_both_sides",
                                     "times_query_start"])  # fmt: skip
def test_attention(feature: str) -> None:
    place = PLACES["interpreted"]
    with addresses_checked():
        feature_case(place, feature).run(place.backend)


@pytest.mark.parametrize("bias", ["linear", "gates", "times"])
@pytest.mark.parametrize("keys", [1, 63, 64, 200])
def test_decoding(keys: int, bias: str) -> None:
    case = random_case(batch=1, heads=2, queries=1, keys=keys, bias=bias, key_norms=torch.full((1, 2), 9.0))
    with addresses_checked(), torch.no_grad():
        case.attend("triton")
