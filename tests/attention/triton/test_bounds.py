"""Every term of the kernels' bounds is needed: inputs for which a bound without it skips too much (tight.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention import tight
from tests.attention.dense import Case, dense
from tests.attention.triton.interpreter import kept_by_both

SLOPES = [0.03, 0.05, 0.08]


def shares(case: Case) -> list[float]:
    """The skipped mass over the tolerance, of the forward pass and of the backward pass."""
    assert case.tolerance is not None
    weights = dense(case)[1]
    return [float(weights.masked_fill(kept, 0.0).sum(-1).max()) / case.tolerance for kept in kept_by_both(case)]


@pytest.mark.parametrize("tolerance", [2.0**-7, 2.0**-9])
def test_the_past(tolerance: float) -> None:
    forward, backward = shares(tight.tight_case(slopes=SLOPES, tolerance=tolerance, share=0.5))
    assert 0.0 < forward <= 0.5
    assert backward <= 1.0


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_future(offset: float) -> None:
    forward, backward = shares(
        tight.tight_case(slopes=[0.03, 0.06, 0.3], tolerance=2.0**-8, share=0.25, ahead=True, offset=offset)
    )
    assert 0.0 < forward <= 0.25
    assert backward <= 1.0


@pytest.mark.parametrize("tolerance", [2.0**-14, 0.01])
def test_queries_longer_than_the_sample(tolerance: float) -> None:
    forward, backward = shares(replace(tight.longer_than_the_sample(), tolerance=tolerance))
    assert forward <= 0.5
    assert backward <= 1.0


@pytest.mark.parametrize("ahead", [False, True], ids=["past", "future"])
def test_mass_spread_thinly_over_many_tiles(ahead: bool) -> None:
    """The backward pass must not leave out many tiles each of which holds too little to matter."""
    forward, backward = shares(tight.thinly_spread(0.01, 0.25 if ahead else 0.5, ahead=ahead))
    assert forward <= (0.25 if ahead else 0.5)
    assert 0.0 < backward <= 1.0


@pytest.mark.parametrize("slope", [0.02, 0.025, 0.1])
def test_decoding(slope: float) -> None:
    """The output is the mass of the keys that may be left out only if it is within the tolerance."""
    case = tight.decoding_case(slope, 2.0**-10)
    with torch.no_grad():
        out = case.attend("triton")
    missed = float((dense(case)[0] - out).abs().max())
    assert missed <= 2.0**-10


@pytest.mark.parametrize("power", [-15, -19, -20, -22, -30])
def test_decoding_with_tiny_queries_and_huge_keys(power: int) -> None:
    """Squares of the queries are lost in float32, their products with the keys are not."""
    keys = torch.zeros(900)
    keys[5], keys[-1] = 1.0, -1.0
    size = 10.0**power
    case = Case(
        q=tight.line(torch.full((1, 1, 1), size)),
        k=tight.line(keys)[None, None] * (40.0 / size if power > -27 else 1e27),
        v=torch.randn(1, 1, 900, 16),
        slopes=torch.tensor([0.03]),
        scale=1.0,
        key_norms=torch.full((1, 1), 40.0 / size if power > -27 else 1e27),
    )
    with torch.no_grad():
        out = case.attend("triton")
    torch.testing.assert_close(out, dense(case)[0].float(), rtol=1e-4, atol=1e-5)
