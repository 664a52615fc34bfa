"""What goes wrong says so in one sentence, and nothing is lost."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from tests.training.small import assert_same_run, small_config
from tests.training.test_resume import stop_after
from trainshort.data.config import PrepareConfig
from trainshort.data.prepare import prepare
from trainshort.training.metrics import Metrics
from trainshort.training.run import Interrupted, RunFolder
from trainshort.training.train import train


@pytest.fixture
def half(data: Path, tmp_path: Path) -> Path:
    """A run that was stopped at step 4 of 8."""
    with pytest.raises(Interrupted):
        train(small_config(data, tmp_path / "half"), progress=False, stop=stop_after(4))
    return tmp_path / "half"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(half: Path, data: Path, error: type[Exception], match: str, **changes: Any) -> None:
    """Going on is refused with that sentence, and changes no file."""
    before = contents(half)
    with pytest.raises(error, match=match):
        train(small_config(data, half, **changes), progress=False, resume=True)
    assert contents(half) == before


def damage(path: Path, change: Callable[[bytes], bytes]) -> Callable[[], None]:
    before = path.read_bytes()
    path.unlink()  # a linked name keeps its own content
    path.write_bytes(change(before))
    return lambda: (path.unlink(), path.write_bytes(before), None)[-1]


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_truncated_checkpoint(data: Path, whole: Path, half: Path, kind: str) -> None:
    repair = damage(half / "state" / f"{kind}-00000004.safetensors", lambda content: content[: len(content) // 2])
    refused(half, data, ValueError, rf"{kind}-00000004.safetensors has .* bytes and should have .*: it was cut")
    repair()
    train(small_config(data, half), progress=False, resume=True)
    assert_same_run(half, whole)


def test_a_damaged_checkpoint(data: Path, half: Path) -> None:
    damage(half / "state" / "optimizer-00000004.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]))
    refused(half, data, ValueError, "another sha256 than state.json says: it is damaged")


def test_a_missing_checkpoint(data: Path, half: Path) -> None:
    (half / "state" / "model-00000004.safetensors").unlink()
    refused(half, data, FileNotFoundError, "no such file; the checkpoint of step 4 needs it")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other"}'])
def test_a_state_that_is_none(data: Path, half: Path, content: str) -> None:
    (half / "state" / "state.json").write_text(content)
    refused(half, data, ValueError, r"state\.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.5}, "lr was 0.001, is 0.5 now"),
        ({"steps": 9}, "steps was 8, is 9 now"),
        ({"position": "rotary"}, "position was 'alibi', is 'rotary' now"),
        ({"d_model": 32, "seed": 3}, "d_model was 16, is 32 now; seed was 0, is 3 now"),
        ({"log_every": 2}, "log_every was 1, is 2 now"),
    ],
)
def test_a_changed_config(data: Path, half: Path, changes: dict[str, Any], said: str) -> None:
    refused(half, data, ValueError, f"started with another config: {said}", **changes)


def test_a_config_that_was_edited_in_the_folder(data: Path, half: Path) -> None:
    path = half / "train.json"
    path.write_text(path.read_text().replace('"lr": 0.001', '"lr": 0.5'))
    with pytest.raises(ValueError, match=r"started with another config: lr was 0\.001, is 0\.5 now"):
        train(RunFolder(half).config(), progress=False, resume=True)
    path.write_text(path.read_text().replace('"lr"', '"lrr"'))
    with pytest.raises(ValueError, match=r"train\.json: TrainConfig has no field 'lrr'; did you mean 'lr'\?"):
        RunFolder(half).config()


def test_a_changed_data_file(data: Path, whole: Path, half: Path, tmp_path: Path) -> None:
    """Of the same size, with one token changed: found by its content."""
    copy = Path(shutil.copytree(data, tmp_path / "copy"))
    tokens = np.memmap(copy / "tokens.bin", dtype=np.uint16, mode="r+")
    tokens[5] ^= 1
    tokens.flush()
    refused(half, copy, ValueError, r"tokens\.bin is not what prepare wrote")
    with pytest.raises(ValueError, match=r"tokens\.bin is not what prepare wrote"):
        train(small_config(copy, tmp_path / "new"), progress=False)
    tokens[5] ^= 1
    tokens.flush()
    train(small_config(copy, half), progress=False, resume=True)
    assert_same_run(half, whole)


def test_other_data(data: Path, half: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"quite another text, number {number}")
    other = prepare(PrepareConfig(sources=(str(tmp_path / "text"),), out=str(tmp_path / "other")))
    refused(half, other, ValueError, "is not the data that .* was started with")


def test_truncated_data(data: Path, half: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(data, tmp_path / "copy"))
    (copy / "tokens.bin").write_bytes((data / "tokens.bin").read_bytes()[:-2])
    refused(half, copy, ValueError, r"tokens\.bin has .* bytes, meta\.json says .*: it was cut or changed")


def test_a_folder_that_holds_a_run(data: Path, half: Path) -> None:
    before = contents(half)
    with pytest.raises(FileExistsError, match=r"holds a run already \(step 4 of 8\): .*--resume"):
        train(small_config(data, half), progress=False)
    assert contents(half) == before


def test_two_processes_in_one_folder(data: Path, half: Path) -> None:
    with RunFolder(half).locked(), pytest.raises(RuntimeError, match="another process is training in this folder"):
        train(small_config(data, half), progress=False, resume=True)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), None], ids=["python", "rust"])
@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_full_disk(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: OSError | None
) -> None:
    """In the middle of the checkpoint of step 6: that of step 3 stays, and the run can go on from it."""
    write = safetensors.torch.save_file

    def full(tensors: Any, path: Path, **options: Any) -> None:
        write(tensors, path, **options)
        if f"{kind}-00000006" in str(path):
            path.write_bytes(path.read_bytes()[:100])
            raise error or safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    config = small_config(data, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(
            RuntimeError, match=r"no space left on the disk for the checkpoint of step 6.*step 3 is whole"
        ):
            train(config, progress=False)
    names = {path.name for path in (tmp_path / "run").rglob("*.safetensors")}
    assert names == {"model.safetensors", "model-00000003.safetensors", "optimizer-00000003.safetensors"}
    assert not list((tmp_path / "run").rglob("*.partial"))
    train(config, progress=False, resume=True)
    assert_same_run(tmp_path / "run", whole)


def test_a_full_disk_under_the_metrics(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Metrics.add

    def full(self: Metrics, row: dict[str, Any]) -> None:
        if row["step"] == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, row)

    config = small_config(data, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "add", full)
        with pytest.raises(RuntimeError, match="no space left on the disk; the checkpoint of step 3 is whole"):
            train(config, progress=False)
    train(config, progress=False, resume=True)
    assert_same_run(tmp_path / "run", whole)


def test_a_loss_that_explodes(data: Path, tmp_path: Path) -> None:
    config = small_config(data, tmp_path / "run", lr=1e30, clip=0.0, warmup=0, steps=50)
    with pytest.raises(RuntimeError, match=r"the loss is .* the learning rate 1e\+30 is too high"):
        train(config, progress=False)
    assert RunFolder(tmp_path / "run").load().step in (0, 3)


def test_text_too_short(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one sequence needs 65,537"):
        train(small_config(data, tmp_path / "run", length=65536, batch_tokens=65536, accumulation=1), progress=False)
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu, or one that torch finds here; got 'gpu'"):
        train(small_config(data, tmp_path / "run", device="gpu"), progress=False)


def test_a_model_that_cannot_be(data: Path, tmp_path: Path) -> None:
    config = small_config(data, tmp_path / "run")
    with pytest.raises(ValueError, match="position must be one of"):
        train(replace(config, position="alibii"), progress=False)
    with pytest.raises(ValueError, match="no field 'activatoin'"):
        train(replace(config, model_options={"activatoin": "relu"}), progress=False)
    assert not RunFolder(tmp_path / "run").has_checkpoint


def test_state_is_plain_json(half: Path) -> None:
    state = json.loads((half / "state" / "state.json").read_text())
    assert state["step"] == 4
    assert state["sequences"] == 16
    assert not state["finished"]
