"""What can be seen with one process of torchrun's: sharded runs beside plain ones, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.distributed.launched import pretend_launched
from tests.distributed.worker import stop_after
from tests.training.small import metrics_of, small_config, small_data
from trainshort.cli.train import Flags
from trainshort.training.processes import joined
from trainshort.training.run import Interrupted, RunFolder
from trainshort.training.train import train


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pretend_launched(monkeypatch)
    yield
    assert not dist.is_initialized(), "who made the process group ends it"


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_rank_trains_what_a_plain_process_trains(data: Path, tmp_path: Path, parallel: str) -> None:
    changes: dict[str, Any] = {"dropout": 0.0, "position_options": {"trainable": True}, "checkpoint_every": 4}
    plain = train(small_config(data, tmp_path / "plain", **changes), progress=False)
    assert not (plain / "logs").exists()
    shared = train(
        small_config(data, tmp_path / "run", parallel=parallel, activation_checkpointing=True, **changes),
        progress=False,
    )
    assert metrics_of(plain) == metrics_of(shared)
    weights, others = load_file(plain / "model.safetensors"), load_file(shared / "model.safetensors")
    assert all(torch.equal(weights[name], others[name]) for name in weights | others)
    assert RunFolder(shared).finished
    assert [path.name for path in (shared / "state" / "shards-00000008").iterdir()] == [
        "shard-00001-model-00001-of-00001.safetensors"
    ]


@pytest.mark.usefixtures("launched")
def test_a_process_that_ends_with_its_command_does_not_end_the_group(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would wait for exchanges which others have not joined, and what went wrong would be said after it."""
    monkeypatch.setattr("trainshort.training.launch._ends_at_once", True)
    with pytest.raises(ValueError, match="went wrong"), joined(small_config(data, tmp_path / "run", parallel="ddp")):
        raise ValueError("went wrong")
    assert dist.is_initialized()
    dist.destroy_process_group()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("[pair.cc:5] Connection closed by peer [127.0.0.1]:5", r"has lost it; .*\(--resume\)$"),
        ("NCCL error in c10d/NCCLUtils.cpp: of the system\nx", r"\(it said: NCCL error in c10d/.*: of the system\)$"),
        ("no gloo device: eth7", r"has lost it; .*\(it said: no gloo device: eth7\)$"),
    ],
)
def test_a_process_that_was_lost_and_what_may_be_something_else(
    data: Path, tmp_path: Path, error: str, told: str
) -> None:
    with pytest.raises(RuntimeError, match=told), joined(small_config(data, tmp_path / "run", parallel="ddp")):
        raise RuntimeError(error)


@pytest.mark.usefixtures("launched")
def test_a_device_of_its_own_is_no_choice_for_a_rank(data: Path, tmp_path: Path) -> None:
    config = small_config(data, tmp_path / "run", device="meta", parallel="ddp")
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda with several processes"), joined(config):
        pass
    assert not dist.is_initialized()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("parallel", [None, "ddp"])
def test_processes_that_are_started_again_go_on_with_their_own_run_alone(
    data: Path, tmp_path: Path, parallel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(data, tmp_path / "run", parallel=parallel)
    others = train(small_config(data, tmp_path / "others", parallel=parallel), progress=False)
    before = {path: path.read_bytes() for path in others.rglob("*") if path.is_file()}
    job = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
    about = {"USE_AGENT_STORE": True, "MAX_RESTARTS": 2, "RESTART_COUNT": 0}
    for name, value in about.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", str(value))
    monkeypatch.setenv("MASTER_PORT", str(job.port))
    with pytest.raises(Interrupted):
        train(config, progress=False, stop=stop_after(3))
    with pytest.raises(FileExistsError, match="holds a run already"):
        train(config, progress=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(config, progress=False)
    assert RunFolder(tmp_path / "run").finished
    for steps in (config.steps, config.steps + 4):
        with pytest.raises(FileExistsError, match="others holds a run already"):
            train(replace(config, out=str(others), steps=steps), progress=False)
    assert {path: path.read_bytes() for path in others.rglob("*") if path.is_file()} == before


def test_processes_are_what_torchrun_starts(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parallel 'fsdp' needs processes that torchrun starts"):
        train(small_config(data, tmp_path / "run", parallel="fsdp"), progress=False)
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_as_its_processes_are(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --parallel: as before under torchrun, and plainly without it."""
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").write_config(small_config(data, tmp_path / "run", parallel="fsdp"))
    flags = {"out": str(tmp_path / "run"), "resume": True}
    assert Flags.from_flags(**flags).config().parallel is None
    assert Flags.from_flags(**flags, parallel="ddp").config().parallel == "ddp"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Flags.from_flags(**flags).config().parallel == "fsdp"
    monkeypatch.setenv("WORLD_SIZE", "two")
    with (
        pytest.raises(ValueError, match="WORLD_SIZE='two', which torchrun sets to a whole number"),
        joined(small_config(data, tmp_path / "run")),
    ):
        pass
