"""Certificates by the million: random and hostile calls of every kind, every query's skipped mass in float64.

How many query rows were compared, and the worst share of the tolerance, stands in the last lines of the test run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.ops.certificates import FLOAT64_NOISE, Count, count
from tests.ops.generators import cases

# A worst share below this would mean windows so wide that counting them tells nothing. Powers of the distance are
# certified by a line below them, which leaves more room.
TIGHT = {"slopes": 0.9, "decay": 0.9, "power": 0.8}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", TIGHT)
@pytest.mark.parametrize("seed", range(4))
def test_certificates_counted(seed: int, kinds: str, record_property: Callable[[str, object], None]) -> None:
    found = count(itertools.islice(cases(seed, kinds=kinds), 400))
    record_property("certified rows", found.rows)
    record_property("worst share of the tolerance", found.worst)
    assert found.worst <= 1.0 + FLOAT64_NOISE, f"{found}, by {found.by}"
    assert found.rows >= 800_000
    assert found.worst >= TIGHT[kinds], "too loose to tell anything"


@pytest.mark.parametrize("kinds", ["slopes", "decay", "power"])
def test_some_certificates_counted(kinds: str) -> None:
    found = count(itertools.islice(cases(100, lengths=(129, 300), kinds=kinds), 40))
    assert found.worst <= 1.0 + FLOAT64_NOISE, f"{found}, by {found.by}"
    assert found.rows > 10_000


def test_a_mass_that_is_too_large_is_noticed() -> None:
    """A count over windows for a thousand times the tolerance fails."""
    wider = Count()
    for case in itertools.islice(cases(3, lengths=(129, 300)), 20):
        found = count([case], asked=1e3)
        wider.worst = max(wider.worst, found.worst)
    assert wider.worst > 1.0
