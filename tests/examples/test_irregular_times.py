"""The example of events at irregular times runs, and finds what the docs say, with fewer steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

PATH = Path(__file__).resolve().parents[2] / "examples" / "irregular_times.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("irregular_times", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_learns_and_holds_on_long_spans(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        errors = example.main(steps=60, lengths=(64, 512))
    finally:
        torch.set_num_threads(threads)
    best, time, untold = errors["Kalman filter"], errors["fades by time"], errors["fades by none"]
    assert time[0] < 0.75 * example.NOISE, "better than single measurements"
    assert max(time) < 1.1 * min(time), "as good on long spans as on short ones"
    assert time[1] < untold[1]
    assert all(one > other for one, other in zip(time, best, strict=True)), "nothing beats the best"
    assert "keys visited" in capsys.readouterr().out


def test_the_filter_knows_the_process(example: ModuleType) -> None:
    """Its error is what its own variance says: the measurements are drawn as it assumes."""
    spans = example.draw(400, 200, torch.Generator().manual_seed(0))
    assert bool((spans.times.diff(dim=1) >= 0).all())
    assert abs(float(spans.truth.var()) - 1.0) < 0.1
    assert abs(float((spans.measured - spans.truth).std()) - example.NOISE) < 0.02
    estimate = example.kalman(spans)
    residual = (estimate - spans.truth)[:, 32:]
    assert abs(float((residual * estimate[:, 32:]).mean())) < 0.02, "an estimate that could be better by a factor"
