"""Every term of the kernels' bounds is needed: see bounds.py."""

from __future__ import annotations

import pytest

from trainshort.ops import INTERPRETED

if INTERPRETED:
    from tests.ops.triton.bounds import CHECKS

    NAMES = list(CHECKS)
else:  # the kernels can't be imported without Triton
    NAMES = []


@pytest.mark.parametrize("name", NAMES)
def test_bounds(name: str) -> None:
    CHECKS[name]()
