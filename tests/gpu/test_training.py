"""A training run on the GPU: its steps wait for nothing, its batches come ahead, its lines are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tests.training.small import count_graphs, metrics_of, small_config, small_data
from trainshort.training import train as module
from trainshort.training.ahead import BatchesAhead
from trainshort.training.batches import Batches
from trainshort.training.run import Interrupted
from trainshort.training.speed import matrix_rate
from trainshort.training.train import train


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("packing", ["across", "documents"])
def test_a_step_does_not_wait_for_the_gpu(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    one_step = module._Trainer._one_step

    def watched(trainer: Any, parts: Any, log: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if trainer.step else "default")  # the first may look around
        try:
            one_step(trainer, parts, log)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(module._Trainer, "_one_step", watched)
    config = small_config(data, tmp_path / "run", device="cuda", compile=False, packing=packing, dropout=0.0)
    rows = metrics_of(train(config, progress=False))
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert [row["step"] for row in rows if "validation_loss" in row] == [4, 8]
    assert all(0.0 < row["mfu"] < 1.0 for row in rows if "loss" in row and row["step"] > 1)


def test_a_run_that_is_stopped_has_all_of_its_lines(data: Path, tmp_path: Path) -> None:
    config = small_config(data, tmp_path / "run", device="cuda", compile=False)
    answers = iter([False, False, False, False, True])
    with pytest.raises(Interrupted):
        train(config, progress=False, stop=lambda: next(answers))
    assert [row["step"] for row in metrics_of(tmp_path / "run") if "loss" in row] == [1, 2, 3, 4, 5]
    train(config, progress=False, resume=True)
    assert [row["step"] for row in metrics_of(tmp_path / "run") if "loss" in row] == list(range(1, 9))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_blocks_are_compiled_once_under_autocast(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = count_graphs(monkeypatch)
    train(small_config(data, tmp_path / "run", device="cuda", num_layers=4), progress=False)
    assert len(graphs) == 1


def test_batches_ahead_are_the_same() -> None:
    tokens = torch.randint(1000, (100_000,)).numpy().astype("uint16")
    batches, again = Batches(tokens, 64), Batches(tokens, 64)
    device = torch.device("cuda", torch.cuda.current_device())

    def starts(step: int) -> list[int]:
        return batches.starts(step * 16, 16)

    with BatchesAhead(lambda step: [batches.batch(starts(step))], device, first=0, last=49) as ahead:
        for step in range(50):
            (found,) = ahead.next()
            torch.cuda._sleep(1_000_000)  # the step is still to come while later batches are copied
            right = again.batch(again.starts(step * 16, 16))
            assert torch.equal(found.inputs.cpu(), right.inputs)
            assert torch.equal(found.targets.cpu(), right.targets)


def test_the_matrix_rate_leaves_random_numbers_alone() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_rng_state(device)
    rate = matrix_rate(device)
    assert rate is not None
    assert rate > 1e12
    assert torch.equal(torch.cuda.get_rng_state(device), before)
