"""Run folders from strangers: every file of one changed in turn; resuming works or refuses in a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hostile_json import EVERY, opened, survives
from tests.training.small import small_config
from trainshort.common.files import sha256
from trainshort.training.batches import Batches
from trainshort.training.metrics import read_metrics
from trainshort.training.run import RunFolder
from trainshort.training.train import train


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Path:
    """A run of four steps, stopped after two."""
    config = small_config(data, tmp_path / "run", steps=4)
    steps = iter([False, True])
    with pytest.raises(KeyboardInterrupt):
        train(config, progress=False, stop=lambda: next(steps))
    return tmp_path / "run"


def change_state(run: Path, change: Any) -> None:
    path = run / "state" / "state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


def resume(run: Path) -> None:
    train(RunFolder(run).config(), progress=False, resume=True)


def look_at(run: Path) -> None:
    """All that reads a run without going on with it."""
    folder = RunFolder(run)
    folder.config()
    folder.started_with()
    assert folder.step >= 0
    assert folder.finished in (True, False)
    folder.load()


@pytest.mark.parametrize("every", EVERY)
def test_state_json(run: Path, every: int) -> None:
    survives(run / "state" / "state.json", lambda: look_at(run), home=run, every=every)


@pytest.mark.parametrize("every", EVERY)
def test_train_json(run: Path, every: int) -> None:
    survives(run / "train.json", lambda: look_at(run), home=run, every=every)


@pytest.mark.parametrize("step", [5, 10**9, 10**30])
def test_a_step_beyond_the_plan_does_not_count_as_done(run: Path, step: int) -> None:
    change_state(run, lambda state: state.update(step=step, finished=True))
    with pytest.raises(ValueError, match=r"state\.json: step has to be (at most 4, the steps of|a whole number)"):
        _ = RunFolder(run).finished
    with pytest.raises(ValueError, match=r"state\.json: step has to be"):
        resume(run)


def test_a_run_that_only_says_that_it_is_finished(run: Path) -> None:
    change_state(run, lambda state: state.update(finished=True))
    with pytest.raises(ValueError, match=r"state\.json: finished is True at step 2 of 4"):
        _ = RunFolder(run).finished


@pytest.mark.parametrize(
    "name", ["../../outside.safetensors", "/dev/zero", "model-/../../x.safetensors", "..", "", ".model-1.safetensors"]
)
def test_names_that_leave_the_folder(run: Path, name: str) -> None:
    outside = run.parent / "outside.safetensors"
    outside.write_bytes((run / "model.safetensors").read_bytes())
    entry = {"name": name, "size": outside.stat().st_size, "sha256": sha256(outside)}
    change_state(run, lambda state: state["files"].update(model=entry))
    with (
        opened() as paths,
        pytest.raises(ValueError, match="name has to be that of a file in the same folder, model-N"),
    ):
        resume(run)
    assert not [path for path in paths if "outside" in path or path.startswith("/dev")]


def test_a_device_under_the_name_of_a_checkpoint(run: Path) -> None:
    path = next((run / "state").glob("model-*"))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a file"):
        resume(run)


def test_a_lock_that_leads_elsewhere(run: Path) -> None:
    """A link in the place of the lock: what it leads to stays as it is."""
    mine = run.parent / "mine.txt"
    mine.write_text("mine")
    (run / "state" / "lock").unlink()
    (run / "state" / "lock").symlink_to(mine)
    with pytest.raises(ValueError, match="lock: not a file of ours"):
        resume(run)
    assert mine.read_text() == "mine"
    (run / "state" / "lock").unlink()
    os.mkfifo(run / "state" / "lock")
    resume(run)  # opened without waiting for anybody


def test_an_optimizer_that_lacks_something(run: Path) -> None:
    import safetensors.torch

    path = next((run / "state").glob("optimizer-*"))
    whole = safetensors.torch.load_file(path)
    for missing, said in (
        ("random.cpu", "no state of random numbers"),
        ("adamw.head.weight.exp_avg", "has exp_avg_sq"),
    ):
        name = missing if missing in whole else next(each for each in whole if each.endswith(".exp_avg"))
        safetensors.torch.save_file({key: value for key, value in whole.items() if key != name}, path)
        entry = {"name": path.name, "size": path.stat().st_size, "sha256": sha256(path)}
        change_state(run, lambda state, entry=entry: state["files"].update(optimizer=entry))
        with pytest.raises(ValueError, match=said):
            resume(run)


def test_lines_of_metrics(run: Path) -> None:
    path = run / "metrics.jsonl"
    before = read_metrics(path)
    with path.open("a") as file:
        for line in (
            "[" * 100_000,
            '{"step": "x"}',
            '{"step": NaN}',
            "3",
            '{"loss": 1}',
            '{"step": 1' + "0" * 5000 + "}",
        ):
            file.write(line + "\n")
    assert read_metrics(path) == before
    resume(run)
    assert [row["step"] for row in read_metrics(path) if "loss" in row] == [1, 2, 3, 4]


def test_tokens_beyond_the_vocabulary() -> None:
    batches = Batches(np.array([1, 2, 3, 900, 5], dtype="<u2"), 2, vocab_size=257)
    with pytest.raises(ValueError, match="the data has token 900, and its vocabulary ends at 256"):
        batches.batch([0, 2])
