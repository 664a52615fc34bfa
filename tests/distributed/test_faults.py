"""A rank that is killed ends the job soon, with one sentence; the run goes on from its last checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.launched import torchrun
from tests.distributed.test_training import assert_close_runs
from tests.training.small import small_config, small_data
from trainshort.training.metrics import read_metrics
from trainshort.training.run import RunFolder
from trainshort.training.train import train

FLAGS = (
    "--num-layers 2 --d-model 16 --num-heads 2 --length 32 --batch-tokens 256 --accumulation 2 --steps 8 --warmup 2"
)
EVERY = "--eval-every 4 --eval-tokens 128 --checkpoint-every 3 --device cpu"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the flags train, by one process without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(small_config(data, folder, dropout=0.0, batch_tokens=256), progress=False)


def flags(data: Path, out: Path, parallel: str) -> list[str]:
    return ["train", *FLAGS.split(), *EVERY.split(), "--data", str(data), "--out", str(out), "--parallel", parallel]


def test_torchrun_trains(data: Path, whole: Path, tmp_path: Path) -> None:
    """The command of the docs, with two processes: one process speaks, and the run is that of one."""
    ended = torchrun(2, "trainshort", *flags(data, tmp_path / "run", "ddp"))
    assert ended.status == 0, ended.errors
    assert "step 8 of 8" in ended.errors
    assert_close_runs(tmp_path / "run", whole)
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "parallel", "step"), [("1 step 9", "ddp", 3), ("0 write 2", "fsdp", 0)])
def test_a_killed_rank_ends_the_job(
    data: Path, whole: Path, tmp_path: Path, fault: str, parallel: str, step: int
) -> None:
    """In the fifth step, and in the write of the checkpoint of step 3."""
    run = tmp_path / "run"
    ended = torchrun(2, "tests.distributed.faulty", *flags(data, run, parallel), FAULT=fault)
    assert ended.status != 0
    assert ended.seconds < 60
    assert len(ended.sentences) == 1, ended.errors
    assert "a process of this run has ended" in ended.sentences[0]
    assert "go on with --resume" in ended.sentences[0]
    assert RunFolder(run).step == step
    train(replace(RunFolder(run).config(), parallel=None), progress=False, resume=True)
    assert_close_runs(run, whole)
    assert {path.name for path in (run / "state").iterdir()} == {
        "lock",
        "model-00000008.safetensors",
        "optimizer-00000008.safetensors",
        "state.json",
    }


@pytest.mark.slow
def test_a_rank_that_fails_says_so_at_once(data: Path, tmp_path: Path) -> None:
    """Though an exchange of its is under way, which the other rank does not join."""
    words = flags(data, tmp_path / "run", "ddp")
    ended = torchrun(2, "tests.distributed.faulty", *words, FAULT="0 error 4")
    assert ended.status == 1
    assert ended.seconds < 60
    assert ended.sentences == ["trainshort train: failed on purpose"]


@pytest.mark.slow
def test_a_killed_rank_ends_an_evaluation(whole: Path, tmp_path: Path) -> None:
    """In the first window of the second length, as the first call of all is to warm up."""
    words = ["evaluate", str(whole), "--lengths", "32", "64", "--tokens", "640", "--batch-tokens", "320"]
    words += ["--context-parallel", "--device", "cpu", "--out", str(tmp_path)]
    ended = torchrun(2, "tests.distributed.faulty", *words, FAULT="1 window 4")
    assert ended.status != 0
    assert ended.seconds < 60
    (told,) = ended.sentences
    assert "a process of this evaluation has ended (rank 0 has lost it); 32 is done and in" in told
    assert "go on with --lengths 64 --tokens 640" in told


@pytest.mark.slow
def test_torchrun_restarts_go_on(data: Path, whole: Path, tmp_path: Path) -> None:
    """Without --resume: the processes know that they were restarted."""
    run = tmp_path / "run"
    ended = torchrun(2, "tests.distributed.faulty", *flags(data, run, "fsdp"), restarts=1, FAULT="1 step 14")
    assert ended.status == 0, ended.errors
    assert_close_runs(run, whole)
    assert "goes on from step 6" in (run / "logs" / "rank-1.log").read_text()
    assert [row["step"] for row in read_metrics(run) if "loss" in row] == list(range(1, 9))
