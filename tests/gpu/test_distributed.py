"""One process of torchrun's on a GPU, with NCCL: what a plain process trains, sharded or not, compiled or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.launched import pretend_launched
from tests.distributed.worker import stop_after
from tests.training.small import metrics_of, small_config, small_data
from trainshort.training.run import Interrupted, RunFolder
from trainshort.training.train import train


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics_of(folder) if "loss" in row]


@pytest.mark.parametrize(("parallel", "compiled"), [("ddp", False), ("fsdp", False), ("ddp", True), ("fsdp", True)])
def test_one_rank_trains_what_a_plain_process_trains(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: str, compiled: bool
) -> None:
    """In bfloat16 by autocast, with learned slopes, which stay float32; matrices are rounded either way."""
    changes = {"dropout": 0.0, "d_model": 32, "position_options": {"trainable": True}, "device": "auto"}
    plain = train(small_config(data, tmp_path / "plain", compile=False, **changes), progress=False)
    pretend_launched(monkeypatch)
    config = small_config(
        data,
        tmp_path / "run",
        parallel=parallel,
        compile=compiled,
        activation_checkpointing=parallel == "fsdp",
        **changes,
    )
    with pytest.raises(Interrupted):
        train(config, progress=False, stop=stop_after(4))
    train(config, progress=False, resume=True)
    assert not dist.is_initialized()
    assert RunFolder(tmp_path / "run").finished
    assert losses(tmp_path / "run") == pytest.approx(losses(plain), rel=2e-3)


def test_a_plain_process_goes_on_from_shards(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(data, tmp_path / "run", dropout=0.0, d_model=32, device="auto", compile=False)
    whole = train(replace(config, out=str(tmp_path / "whole")), progress=False)
    with monkeypatch.context() as patch:
        pretend_launched(patch)
        with pytest.raises(Interrupted):
            train(replace(config, parallel="fsdp"), progress=False, stop=stop_after(4))
    train(config, progress=False, resume=True)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=2e-3)
