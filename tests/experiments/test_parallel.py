"""Runs trained at once are the same runs, stop together, and say what went wrong."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainshort.data import PrepareConfig
from trainshort.data.prepare import prepare
from trainshort.experiments import parallel
from trainshort.experiments.compare import compare
from trainshort.experiments.config import CompareConfig
from trainshort.experiments.parallel import train_all
from trainshort.experiments.watching import Planned
from trainshort.training import RunFolder, TrainConfig


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    (folder / "book.txt").write_text("A book of one sentence, again and again and again. " * 200)
    sources = (str(folder / "book.txt"),)
    return prepare(PrepareConfig(sources=sources, out=str(folder / "data"), workers=1), progress=False)


def small(data: Path, out: Path, jobs: int, steps: int = 3) -> CompareConfig:
    return CompareConfig(
        data=str(data),
        out=str(out),
        positions=("alibi", "none"),
        length=(16,),
        multiples=(1, 2),
        steps=steps,
        batch_tokens=64,
        num_layers=1,
        d_model=16,
        num_heads=2,
        test_tokens=64,
        device="cpu",
        checkpoint_every=0,
        jobs=jobs,
    )


@pytest.mark.slow
def test_together_or_one_by_one_the_runs_are_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = compare(small(data, tmp_path / "one", jobs=1))
    two = compare(small(data, tmp_path / "two", jobs=2))
    for first, second in zip(one["runs"], two["runs"], strict=True):
        assert first["folder"] == second["folder"]
        for left, right in zip(first["records"], second["records"], strict=True):
            assert left["nll_sum"] == pytest.approx(right["nll_sum"], rel=1e-5)


@pytest.mark.slow
def test_an_error_is_that_of_the_run(data: Path, tmp_path: Path) -> None:
    good = TrainConfig(data=str(data), out=str(tmp_path / "good"), length=16, batch_tokens=64, steps=2)
    bad = TrainConfig(data=str(data), out=str(tmp_path / "bad"), length=16, batch_tokens=64, position="rotery")
    with pytest.raises(RuntimeError, match="did you mean 'rotary'"):
        train_all([Planned(1, 2, bad), Planned(2, 2, good)], 1)
    assert not (tmp_path / "good").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_saves_every_run_and_the_same_command_goes_on(data: Path, tmp_path: Path, number: int) -> None:
    out = tmp_path / "out"
    flags = ["--positions", "alibi", "none", "--length", "16", "--multiples", "1", "2", "--steps", "1000000"]
    flags += [
        "--batch-tokens",
        "64",
        "--num-layers",
        "1",
        "--d-model",
        "16",
        "--num-heads",
        "2",
        "--test-tokens",
        "64",
    ]
    command = [sys.executable, "-m", "trainshort", "compare", "--data", str(data), "--out", str(out)]
    process = subprocess.Popen(
        [*command, *flags, "--jobs", "2", "--device", "cpu", "--checkpoint-every", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    folders = [out / "alibi-16-seed0", out / "none-16-seed0"]
    limit = time.monotonic() + 60
    while not all(
        (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size for folder in folders
    ):
        assert time.monotonic() < limit
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "stopped with 0 of 2 runs trained and tested" in error
    assert "the same compare goes on from there" in error
    assert "Traceback" not in error
    for folder in folders:
        assert RunFolder(folder).step > 0
        assert not RunFolder(folder).finished


class Process:
    """Stands for a run that is being trained: its place in the order, and the GPU it was given."""

    begun: list[tuple[int, str | None]]

    def __init__(self, run: Planned, threads: int, board: object, gpu: str | None) -> None:
        self.run, self.gpu, self.process, self.error = run, gpu, self, ""
        self.left = 3 if gpu == "5" else 1  # looks until it is done: one GPU is slow
        Process.begun.append((run.number, gpu))

    def poll(self) -> int | None:
        self.left -= 1
        return None if self.left > 0 else 0

    def end(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("visible", "jobs", "gpus"),
    [
        ("5,7", None, ["5", "7", "7", "7", "5"]),  # whichever is free
        ("5,7", 4, ["5", "7", "5", "7", "7"]),  # two a GPU
        ("5,7", 1, None),
        ("5", None, None),
        ("", None, None),
    ],
)
def test_runs_are_spread_over_the_gpus(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    jobs: int | None,
    gpus: list[str] | None,
) -> None:
    """With 0 or 1 GPU, or jobs 1, nothing is started: runs are trained here, one after the other."""
    Process.begun = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible.split(",")) if visible else 0)
    monkeypatch.setattr(parallel, "_Process", Process)
    asked: list[str] = []

    def trained(training: TrainConfig, *rest: object) -> None:
        asked.append(training.position)
        raise KeyboardInterrupt

    monkeypatch.setattr("trainshort.experiments.compare._trained", trained)
    config = replace(
        small(data, tmp_path, jobs=1), jobs=jobs, device="auto", seeds=(0, 1, 2, 3, 4), positions=("none",)
    )
    with pytest.raises(KeyboardInterrupt):
        compare(config, progress=False)
    assert asked == ["none"]
    assert [gpu for _, gpu in Process.begun] == (gpus or [])


def test_compare_refuses_torchrun(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="run it without torchrun"):
        compare(small(data, tmp_path, jobs=1), progress=False)


def test_a_process_sees_its_gpu_alone(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    class Popen:
        stderr = io.StringIO()

        def __init__(self, command: list[str], *, env: dict[str, str], **options: object) -> None:
            seen.append(env)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    run = Planned(1, 1, small(data, tmp_path, jobs=1).training(str(data), "none", 16, 0))
    for gpu in ("7", None):
        parallel._Process(run, 1, None, gpu)  # type: ignore[arg-type]
    assert seen[0]["CUDA_VISIBLE_DEVICES"] == "7"
    assert seen[1].get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
