"""Death at any moment of a write leaves a whole checkpoint: the one before or the new one, never a mixture."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.small import assert_same_run, small_config
from trainshort.training.run import RunFolder
from trainshort.training.train import train

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
def test_every_operation_of_a_save_may_be_the_last(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.training.crash", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True, timeout=120)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) > 12
    assert [row["died"] for row in rows] == [True] * (len(rows) - 1) + [False]
    for row in rows:
        assert row["model"] == row["optimizer"] == row["step"], row
        assert row["published"] in (1, row["step"]), row
        assert row["finished"] == (row["published"] == row["step"]), row
        assert row["next"] == 3
        files = ["lock", "model-00000003.safetensors", "model.safetensors", "optimizer-00000003.safetensors"]
        assert row["left"] == [*files, "state.json", "train.json"], row
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps), "once the new one is there it stays"
    assert set(steps) == {1, 2}


SLOWED = """
import sys, time, safetensors.torch as st
from pathlib import Path
from trainshort.training.train import train
from trainshort.training.run import RunFolder
write = st.save_file
def save_file(tensors, path, **options):
    '''Half of the file, for a while, and then all of it.'''
    write(tensors, path, **options)
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2])
    print("writing", flush=True)
    time.sleep(float(sys.argv[2]))
    write(tensors, path, **options)
st.save_file = save_file
train(RunFolder(sys.argv[1]).config(), progress=False, resume=True)
"""


def start(run: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOWED, str(run), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


@pytest.mark.slow
def test_kill_at_random_moments(data: Path, tmp_path: Path) -> None:
    """Ten kills, half of them in the middle of a write; then the run is compared with one that nobody killed."""
    config = small_config(data, tmp_path / "run", steps=60, checkpoint_every=1)
    train(small_config(data, tmp_path / "whole", steps=60, checkpoint_every=20), progress=False)
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").write_config(config)
    chance = random.Random(7)
    reached = []
    for kill in range(10):
        process = start(tmp_path / "run", pause=0.02 if kill % 2 else 0.3)
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 5)):
            process.stdout.readline()  # a write has begun
        time.sleep(chance.uniform(0, 0.1) if kill % 2 else 0.1)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        process.stdout.close()
        reached.append(RunFolder(tmp_path / "run").step if RunFolder(tmp_path / "run").has_checkpoint else 0)
    assert reached == sorted(reached)
    assert 0 < reached[-1] < 60
    train(config, progress=False, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signals_save_and_stop(data: Path, whole: Path, tmp_path: Path, number: signal.Signals) -> None:
    """By the command line: one sentence, the exit status of a signal, and a run that goes on exactly."""
    config = small_config(data, tmp_path / "run", steps=100_000, checkpoint_every=0)
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").write_config(config)
    command = [sys.executable, "-m", "trainshort.cli.main", "train", "--out", str(tmp_path / "run"), "--resume"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    step = RunFolder(tmp_path / "run").step
    assert f"stopped and saved at step {step} of 100000; --resume goes on from there" in errors
    assert "Traceback" not in errors
    assert step == len([line for line in metrics.read_text().splitlines() if '"loss"' in line])
