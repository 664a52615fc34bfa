"""The tiles that a small GPU gets: the interpreter's other tests have larger ones, which are quicker there."""

from __future__ import annotations

import pytest

from tests.ops.contract.features import feature_case
from tests.ops.contract.places import PLACES
from tests.ops.triton.interpreter import shipped_tiles


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["causal", "symmetric_steep", "bucket_symmetric", "packed", "borders",
                                     "gates_with_cliffs", "gates_with_cliffs_query_start",
                                     "gates_with_cliffs_both_sides", "gates_packed"])  # fmt: skip
def test_feature(feature: str) -> None:
    place = PLACES["interpreted"]
    with shipped_tiles():
        place.check(feature_case(place, feature))
