"""A run that was interrupted goes on as if it had not been: the same losses, the same bits everywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.training.small import assert_same_run, metrics_of, small_config, tensors_of
from trainshort.training.config import TrainConfig
from trainshort.training.optimizer import learning_rate
from trainshort.training.run import Interrupted, RunFolder
from trainshort.training.train import train


def stop_after(steps: int) -> Callable[[], bool]:
    asked = [0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] >= steps

    return stop


def interrupted(config: TrainConfig, *stops: int) -> None:
    """Run for so many steps, again and again, and then to the end."""
    for number, steps in enumerate(stops):
        with pytest.raises(Interrupted, match="stopped and saved at step"):
            train(config, progress=False, stop=stop_after(steps), resume=number > 0)
    train(config, progress=False, resume=True)


@pytest.mark.parametrize("stops", [(1,), (3,), (4,), (7,), (1, 1, 1, 1, 1, 1, 1)])
def test_goes_on_exactly(data: Path, whole: Path, tmp_path: Path, stops: tuple[int, ...]) -> None:
    interrupted(small_config(data, tmp_path / "run"), *stops)
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "muon"},
        {"packing": "documents"},
        {"position": "learned", "accumulation": 1},
        {"dtype": "bfloat16"},
        {"position_options": {"trainable": True}},
    ],
    ids=str,
)
def test_goes_on_exactly_in_every_variant(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = small_config(data, tmp_path / "whole", **changes)
    train(config, progress=False)
    interrupted(replace(config, out=str(tmp_path / "run")), 2, 3)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_runs_differ_where_they_should(data: Path, whole: Path, tmp_path: Path) -> None:
    """What the other tests compare is able to differ: the seed changes it all, and so does one more step."""
    other = train(small_config(data, tmp_path / "run", seed=1), progress=False)
    assert metrics_of(other) != metrics_of(whole)
    one, two = tensors_of(other), tensors_of(whole)
    assert one.keys() == two.keys()
    assert not torch.equal(one["optimizer/random.cpu"], two["optimizer/random.cpu"])
    exp_avg = "optimizer/adamw.trunk.embedding.weight.exp_avg"
    assert not torch.equal(one[exp_avg], two[exp_avg])
    assert any(name.endswith(".exp_avg_sq") for name in one)


def test_the_model_in_the_folder_is_the_checkpoints(whole: Path) -> None:
    model = ts.load(whole)
    assert model.tokenizer.decode(model.tokenizer.encode("a word").ids) == "a word"
    tensors = tensors_of(whole)
    for name, tensor in tensors.items():
        if name.startswith("model/"):
            assert torch.equal(model.state_dict()[name.removeprefix("model/")], tensor)
    assert [path.name for path in sorted((whole / "state").iterdir())] == [
        "lock",
        "model-00000008.safetensors",
        "optimizer-00000008.safetensors",
        "state.json",
    ]
    assert RunFolder(whole).finished


def test_training_leaves_the_random_numbers_of_others_alone(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    train(small_config(data, tmp_path / "run", steps=2), progress=False)
    assert torch.equal(torch.rand(3), wanted)


def test_lines_from_beyond_the_checkpoint_are_dropped(data: Path, whole: Path, tmp_path: Path) -> None:
    """A killed run has logged steps that its checkpoint knows nothing of, and perhaps half a line."""
    run = tmp_path / "run"
    config = small_config(data, run, checkpoint_every=0)
    with pytest.raises(Interrupted):
        train(config, progress=False, stop=stop_after(3))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss": 99.0}) + "\n" + '{"step": 5, "lo')
    train(config, progress=False, resume=True)
    assert_same_run(run, whole)


def test_a_run_that_is_done_stays_as_it_is(data: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    train(small_config(data, tmp_path / "run"), progress=False, resume=True)
    assert_same_run(tmp_path / "run", whole)


def test_more_steps_go_on_with_a_run_that_is_done(data: Path, whole: Path, tmp_path: Path) -> None:
    """With the optimizer and the order of the data as they were, and exactly whenever that is interrupted."""
    shutil.copytree(whole, tmp_path / "run")
    longer = small_config(data, tmp_path / "run", steps=14)
    train(longer, progress=False, resume=True)
    run = RunFolder(tmp_path / "run")
    assert (run.step, run.finished, run.config().extended_at) == (14, True, (8,))
    rows = {row["step"]: row for row in metrics_of(tmp_path / "run") if "loss" in row}
    assert list(rows) == list(range(1, 15))
    assert [rows[step] for step in range(1, 9)] == [row for row in metrics_of(whole) if "loss" in row]
    assert [rows[step]["lr"] for step in (9, 14)] == [learning_rate(longer, step) for step in (9, 14)]
    for stops in ((1,), (5,), (1, 1, 3)):
        other = tmp_path / f"other{len(stops)}{stops[0]}"
        shutil.copytree(whole, other)
        config = replace(longer, out=str(other))
        for steps in stops:
            with pytest.raises(Interrupted):
                train(config, progress=False, stop=stop_after(steps), resume=True)
        train(config, progress=False, resume=True)
        assert_same_run(other, tmp_path / "run")
    train(longer, progress=False, resume=True)  # done: as it is
    assert_same_run(tmp_path / "other15", tmp_path / "run")
    train(replace(longer, steps=16), progress=False, resume=True)
    assert RunFolder(tmp_path / "run").config().extended_at == (8, 14)


def test_a_kill_before_the_first_new_checkpoint_loses_nothing(data: Path, whole: Path, tmp_path: Path) -> None:
    """The run then says in train.json that it is to be longer, and in its checkpoint that it is done."""
    shutil.copytree(whole, tmp_path / "run")
    longer = small_config(data, tmp_path / "run", steps=12)
    RunFolder(tmp_path / "run").write_config(replace(longer, extended_at=(8,)))
    train(RunFolder(tmp_path / "run").config(), progress=False, resume=True)
    assert RunFolder(tmp_path / "run").config().extended_at == (8,)
    assert RunFolder(tmp_path / "run").step == 12


def test_what_else_may_not_change(data: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    for changes in ({"steps": 4}, {"steps": 14, "lr": 0.5}, {"steps": 14, "seed": 3}):
        with pytest.raises(ValueError, match="was started with another config"):
            train(small_config(data, tmp_path / "run", **changes), progress=False, resume=True)
    assert_same_run(tmp_path / "run", whole)
    config = small_config(data, tmp_path / "half")
    with pytest.raises(Interrupted):
        train(config, progress=False, stop=stop_after(3))
    with pytest.raises(ValueError, match=r"More steps may be given once it is done, with 8"):
        train(replace(config, steps=14), progress=False, resume=True)


def test_resume_without_a_checkpoint_starts(data: Path, whole: Path, tmp_path: Path) -> None:
    train(small_config(data, tmp_path / "run"), progress=False, resume=True)
    assert_same_run(tmp_path / "run", whole)


def test_cadences_and_places_may_change(data: Path, whole: Path, tmp_path: Path) -> None:
    config = small_config(data, tmp_path / "first")
    with pytest.raises(Interrupted):
        train(config, progress=False, stop=stop_after(5))
    shutil.copytree(data, tmp_path / "moved")
    (tmp_path / "first").rename(tmp_path / "second")
    moved = replace(config, out=str(tmp_path / "second"), data=str(tmp_path / "moved"), checkpoint_every=1)
    train(moved, progress=False, resume=True)
    assert_same_run(tmp_path / "second", whole)
    assert RunFolder(tmp_path / "second").config() == moved


def test_another_number_of_threads_is_said(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(data, tmp_path / "run", steps=3)
    with pytest.raises(Interrupted):
        train(config, stop=stop_after(1))
    train(config, resume=True, stop=lambda: False)
    assert "differ" not in capsys.readouterr().err
    config = small_config(data, tmp_path / "other", steps=3)
    with pytest.raises(Interrupted):
        train(config, stop=stop_after(1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    train(config, resume=True)
    assert "is 99 now: losses may differ in their last digits" in capsys.readouterr().err
