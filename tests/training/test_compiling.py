"""Training compiles a block once: not for every layer, not for validation, not for every number of documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.small import count_graphs, metrics_of, small_config
from trainshort.training.train import train

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return count_graphs(monkeypatch)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_one_graph(graphs: list[Any], data: Path, tmp_path: Path, dropout: float) -> None:
    """Validation every other step, whose last batch is a smaller one."""
    sizes = {"num_layers": 4, "eval_every": 2, "eval_tokens": 160, "accumulation": 1, "dropout": dropout}
    folder = train(small_config(data, tmp_path / "run", compile=True, **sizes), progress=False)
    assert len(graphs) == 1
    plain = train(small_config(data, tmp_path / "plain", compile=False, **sizes), progress=False)
    assert len(graphs) == 1
    assert [row["step"] for row in metrics_of(folder)] == [row["step"] for row in metrics_of(plain)]
    if dropout == 0.0:
        for one, two in zip(metrics_of(folder), metrics_of(plain), strict=True):
            assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.parametrize("position", ["alibi", "sinusoidal", "rotary", "t5", "fox"])
def test_later_runs_of_a_process_are_compiled_like_the_first(
    graphs: list[Any], data: Path, tmp_path: Path, position: str
) -> None:
    """For their own shape: torch would compile the second for any shape, as it has seen another at the same place."""
    for length in (32, 64):
        sizes = {"length": length, "steps": 2, "eval_tokens": 160}
        train(small_config(data, tmp_path / f"{length}", position=position, compile=True, **sizes), progress=False)
    assert [graph.any_shape for graph in graphs] == [False] * 2


@pytest.mark.slow
def test_documents(graphs: list[Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for the first number of borders, and one for all others."""
    from trainshort.training import batches

    monkeypatch.setattr(batches, "BORDERS_AT_ONCE", 2)  # of few documents as of many: the number of borders changes
    config = small_config(data, tmp_path / "run", compile=True, packing="documents", length=256, batch_tokens=1024)
    train(config, progress=False)
    assert len(graphs) == 2
