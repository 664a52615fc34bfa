"""Decoding with the kernels, as many shares of the keys as on a GPU, and without norms."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.contract.places import PLACES
from tests.ops.contract.test_decoding import assert_output_within_budget, cache, with_norms


@pytest.mark.slow
def test_as_many_splits_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainshort.ops.triton import launch

    monkeypatch.setattr(launch, "MOST_SPLITS", 64)
    for kind in ("none", "keys"):
        assert_output_within_budget(with_norms(cache(PLACES["interpreted"], "steep"), kind), PLACES["interpreted"])


def test_without_norms_everything_is_visited() -> None:
    case = PLACES["interpreted"].case(queries=1, keys=300, slopes=torch.tensor([0.25, 0.3]))
    case.v[:, :, :64] = math.nan
    with torch.no_grad():
        for kind in ("one", "blocks", "keys", "running"):
            assert bool(torch.isfinite(with_norms(case, kind).attend("triton")).all()), kind
        assert not bool(torch.isfinite(case.attend("triton")).any())
