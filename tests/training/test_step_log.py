"""Every step's numbers are written in order, however late they are read, and nothing that is not finite is saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.training.small import metrics_of, small_config
from tests.training.test_resume import stop_after
from trainshort.training.metrics import Metrics, read_metrics
from trainshort.training.progress import TrainProgress
from trainshort.training.run import Interrupted, RunFolder
from trainshort.training.speed import Speed
from trainshort.training.step_log import StepLog
from trainshort.training.train import train


class Late(StepLog):
    """As on a GPU: one step stays unread."""

    def _write(self, leave: int) -> None:
        super()._write(leave=leave if self.flushing else 1)

    flushing = False

    def flush(self) -> None:
        self.flushing = True
        super().flush()
        self.flushing = False


def make_log(folder: Path, data: Path, **changes: Any) -> tuple[Late, list[int]]:
    config = small_config(data, folder, **changes)
    folder.mkdir(exist_ok=True)
    metrics = Metrics(folder, after_step=0, tensorboard=False)
    bar = TrainProgress("x", steps=config.steps, start=0, show=False)
    told: list[int] = []
    log = Late(
        config,
        metrics,
        bar,
        Speed(1, 1, None),
        began=0.0,
        on_step=lambda step, loss: told.append(step),
        failed=lambda step, loss, norm: RuntimeError(f"step {step}: {loss} {norm}"),
    )
    return log, told


def test_late_numbers_are_written_in_order(data: Path, tmp_path: Path) -> None:
    log, told = make_log(tmp_path / "run", data, log_every=2)
    for step in range(1, 8):
        log.add(step, 0.1, torch.tensor(float(step)), torch.tensor(1.0))
    assert told == [2, 4, 6]
    log.add(8, 0.1, torch.tensor(8.0), torch.tensor(1.0))
    assert told == [2, 4, 6]
    log.flush()
    log.metrics.close()
    assert told == [2, 4, 6, 8]
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path / "run")] == [(n, n) for n in (2, 4, 6, 8)]


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf)])
def test_what_is_not_finite_stops_at_the_flush(data: Path, tmp_path: Path, loss: float, norm: float) -> None:
    """Also in steps that are not logged."""
    log, _ = make_log(tmp_path / "run", data, log_every=100)
    log.add(1, 0.1, torch.tensor(loss), torch.tensor(norm))
    with pytest.raises(RuntimeError, match="step 1: "):
        log.flush()
    log.metrics.close()


def broken_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    loss, calls = ts.LanguageModel.loss, [0]

    def broken(model: Any, *args: Any, **options: Any) -> Any:
        calls[0] += torch.is_grad_enabled()
        return loss(model, *args, **options) * (math.nan if calls[0] == call else 1.0)

    monkeypatch.setattr(ts.LanguageModel, "loss", broken)


def test_a_checkpoint_is_never_written_of_weights_that_are_not_finite(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the run is asked to stop at the very step, which is not logged and not read yet."""
    from trainshort.training import train as module

    monkeypatch.setattr(module, "StepLog", Late)
    broken_at(monkeypatch, 5)
    config = small_config(data, tmp_path / "run", accumulation=1, log_every=100, checkpoint_every=2, eval_every=0)
    with pytest.raises(RuntimeError, match=r"at step 5 the loss is nan.*checkpoint of step 4 is whole"):
        train(config, progress=False, stop=stop_after(5))
    assert RunFolder(tmp_path / "run").step == 4


def test_what_was_computed_is_written_when_a_step_fails(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainshort.training import train as module

    monkeypatch.setattr(module, "StepLog", Late)
    loss, calls = ts.LanguageModel.loss, [0]

    def failing(model: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("out of memory")
        return loss(model, *args, **options)

    monkeypatch.setattr(ts.LanguageModel, "loss", failing)
    config = small_config(data, tmp_path / "run", accumulation=1, eval_every=0, checkpoint_every=0)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(config, progress=False)
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3]


def test_late_reading_changes_nothing(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainshort.training import train as module

    monkeypatch.setattr(module, "StepLog", Late)
    with pytest.raises(Interrupted):
        train(small_config(data, tmp_path / "run"), progress=False, stop=stop_after(5))
    assert [row["step"] for row in metrics_of(tmp_path / "run") if "loss" in row] == [1, 2, 3, 4, 5]
    train(small_config(data, tmp_path / "run"), progress=False, resume=True)
    assert metrics_of(tmp_path / "run") == metrics_of(whole)


def test_the_share_of_keys_is_logged(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainshort.training import train as module

    monkeypatch.setattr(module, "EXAMINE_EVERY", 3)
    train(small_config(data, tmp_path / "alibi"), progress=False)
    found = {row["step"]: row["keys_kept"] for row in metrics_of(tmp_path / "alibi") if "keys_kept" in row}
    assert list(found) == [3, 4, 6, 8]
    assert all(0.0 < value <= 1.0 for value in found.values())
    validated = [row["step"] for row in metrics_of(tmp_path / "alibi") if "validation_loss" in row]
    assert validated == [4, 8]
    train(small_config(data, tmp_path / "rotary", position="rotary"), progress=False)
    assert not any("keys_kept" in row for row in metrics_of(tmp_path / "rotary"))
