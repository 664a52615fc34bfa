"""Runs of several processes: the losses and weights of one process, from checkpoints that any number can go on from.

Two starts of torchrun, with four processes and with two, work off all cases; the tests look at what they left.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trainshort as ts
from tests.distributed.launched import folder_of_all_workers, run_cases
from tests.distributed.worker import stop_after
from tests.training.small import metrics_of, small_config, small_data
from trainshort.training.config import TrainConfig
from trainshort.training.run import Interrupted, RunFolder
from trainshort.training.train import train

pytestmark = pytest.mark.slow

VARIANTS: dict[str, dict[str, Any]] = {
    # Ranks have unequal numbers of targets that count; of four, two have no slopes, and one nothing to validate.
    "documents": {"packing": "documents", "position_options": {"trainable": True}, "eval_tokens": 96},
    "muon": {"optimizer": "muon", "clip": 0.1, "position_options": {"trainable": True}},
    "recomputed": {"activation_checkpointing": True, "accumulation": 1, "batch_tokens": 160},  # 5 rows
    "bfloat16": {"dtype": "bfloat16"},
}
ODD = {
    "config": {"odd_config": {"lr": 0.5}},
    "version": {"odd_version": "0.0.1"},
    "data": {},
    "damaged": {},
    "rows": {},
}


class Runs:
    """Folders by name: what was trained, and what each rank said."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self.cases: dict[int, dict[str, dict[str, Any]]] = {4: {}, 2: {}}
        self.said: dict[str, list[Any]] = {}
        self.plain = {name: folder / f"plain {name}" for name in VARIANTS}
        if not (done := folder / "said.json").exists():
            small_data(folder)
            for name, changes in VARIANTS.items():
                train(self.config(f"plain {name}", **changes), progress=False)
            self.plan()
            for processes, cases in self.cases.items():
                found = run_cases(processes, list(cases.values()), folder)
                self.said |= dict(zip(cases, found, strict=True))
            done.write_text(json.dumps(self.said))
        self.said = json.loads(done.read_text())

    def config(self, name: str, **changes: Any) -> TrainConfig:
        fields = {"dropout": 0.0, "batch_tokens": 256, "data": self.data, "out": self.folder / name, **changes}
        return small_config(fields.pop("data"), fields.pop("out"), **fields)

    def add(self, processes: int, name: str, case: dict[str, Any], folder: str = "", **changes: Any) -> None:
        config = self.config(folder or name, **changes).to_dict()
        self.cases[processes][name] = {**case, "train": config}

    def plan(self) -> None:
        documents = VARIANTS["documents"]
        for kind in ("ddp", "fsdp"):
            self.add(4, f"4 {kind}", {"stop_after": 4}, parallel=kind, **documents)
            for name, changes in VARIANTS.items():
                self.add(2, f"{name} {kind}", {}, parallel=kind, **changes)
        for before, now in (("ddp", "fsdp"), ("fsdp", "ddp")):
            case = {"resume": True, "stop_after": 2}
            self.add(2, f"4 {before}, 2 {now}", case, f"4 {before}", parallel=now, **documents)
        with pytest.raises(Interrupted):
            train(self.config("1 then 2", **documents), progress=False, stop=stop_after(3))
        self.add(2, "1 then 2", {"resume": True}, parallel="fsdp", **documents)
        for name, case in (("whole", {}), ("parts", {"stop_after": 4}), ("parts, resumed", {"resume": True})):
            self.add(2, f"dropout {name}", case, f"dropout {name.split(',')[0]}", parallel="fsdp", dropout=0.2)
        self.plan_refusals()

    def plan_refusals(self) -> None:
        other, damaged = self.folder / "other", self.folder / "damaged data"
        other.mkdir()
        (other / "text").mkdir()
        (other / "text" / "a.txt").write_text("another text, and not at all the same. " * 400)
        from trainshort.data import PrepareConfig
        from trainshort.data.prepare import prepare

        prepare(PrepareConfig(sources=(str(other / "text"),), out=str(other / "data")), progress=False)
        shutil.copytree(self.data, damaged)
        tokens = bytearray((damaged / "tokens.bin").read_bytes())
        tokens[100] ^= 1
        (damaged / "tokens.bin").write_bytes(tokens)
        odd = {**ODD, "data": {"odd_config": {"data": str(other / "data")}}}
        odd["damaged"] = {"odd_config": {"data": str(damaged)}}
        for name, case in odd.items():
            changes = {"batch_tokens": 64, "accumulation": 2} if name == "rows" else {}
            self.add(2, f"refused {name}", {"odd_rank": 1, **case}, **changes)
        self.add(2, "full", {"odd_rank": 1, "full_after": 2}, parallel="fsdp", checkpoint_every=2)
        self.add(2, "full, resumed", {"resume": True}, "full", parallel="fsdp", checkpoint_every=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Made once, also where several workers run the tests of this file side by side."""
    with folder_of_all_workers(tmp_path_factory, "distributed") as folder:
        return Runs(folder)


def assert_close_runs(left: Path, right: Path, tolerance: float = 2e-6) -> None:
    """The same lines of metrics and weights, to rounding. Some weights move by whole steps on gradients near zero."""
    one, other = metrics_of(left), metrics_of(right)
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for before, after in zip(one, other, strict=True):
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert value == pytest.approx(after[name], rel=tolerance), (before["step"], name)
    weights, others = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert (weight - others[name]).norm() <= 20 * tolerance * weight.norm(), name


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_train_what_one_trains(runs: Runs, variant: str, kind: str) -> None:
    assert runs.said[f"{variant} {kind}"] == ["done", "done"]
    tolerance = 2e-3 if variant in ("bfloat16", "muon") else 2e-6  # muon's own arithmetic is in bfloat16
    assert_close_runs(runs.folder / f"{variant} {kind}", runs.plain[variant], tolerance)


@pytest.mark.parametrize(("before", "now"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_four_then_two_then_one(runs: Runs, before: str, now: str) -> None:
    assert runs.said[f"4 {before}"] == ["interrupted"] * 4
    assert runs.said[f"4 {before}, 2 {now}"] == ["interrupted"] * 2
    folder = runs.folder / f"4 {before}"
    assert RunFolder(folder).step == 6
    assert not (folder / "model.safetensors").exists()
    with pytest.raises(ValueError, match="is not the data that"):
        train(
            replace(RunFolder(folder).config(), data=str(runs.folder / "other" / "data"), parallel=None),
            progress=False,
            resume=True,
        )
    train(replace(RunFolder(folder).config(), parallel=None), progress=False, resume=True)
    assert_close_runs(folder, runs.plain["documents"])
    assert sorted(path.name for path in (folder / "state").iterdir()) == [
        "lock",
        "model-00000008.safetensors",
        "optimizer-00000008.safetensors",
        "state.json",
    ]
    assert [(folder / "logs" / f"rank-{rank}.log").exists() for rank in range(4)] == [True] * 4


def test_one_then_two(runs: Runs) -> None:
    assert runs.said["1 then 2"] == ["done", "done"]
    assert_close_runs(runs.folder / "1 then 2", runs.plain["documents"])


def test_an_interrupted_run_goes_on_exactly(runs: Runs) -> None:
    """With dropout, and as many processes as before: bit by bit."""
    assert runs.said["dropout parts"] == ["interrupted", "interrupted"]
    whole, parts = runs.folder / "dropout whole", runs.folder / "dropout parts"
    assert metrics_of(whole) == metrics_of(parts)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*.safetensors"))
    assert len(files) == 4
    for path in files:
        one, other = load_file(whole / path), load_file(parts / path)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), path
    train(small_config(runs.data, runs.folder / "x", dropout=0.2, batch_tokens=256), progress=False)
    assert metrics_of(runs.folder / "x") != metrics_of(whole), "each rank has random numbers of its own"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("config", "rank 1 has another lr than rank 0 (0.5, not 0.001)"),
        ("version", "rank 1 has another version of trainshort than rank 0 ('0.0.1', not"),
        ("data", "rank 1 has another size of tokens.bin than rank 0"),
        ("damaged", "rank 1: "),
        ("rows", "1 rows each, and there are 2 processes to share them"),
    ],
)
def test_a_rank_that_differs_is_refused_by_name(runs: Runs, name: str, field: str) -> None:
    said = runs.said[f"refused {name}"]
    assert all("Error: " in each for each in said)
    assert any(field in each for each in said), said
    assert sum(not each.startswith("EndedByOthersError") for each in said) == 1, "one speaks"
    assert not (runs.folder / f"refused {name}" / "train.json").exists()


def test_a_full_disk_on_one_rank_loses_nothing(runs: Runs) -> None:
    said = runs.said["full"]
    first = next(each for each in said if not each.startswith("EndedByOthersError"))
    assert "no space left on the disk for the checkpoint of step 4" in first
    assert "the checkpoint of step 2 is whole" in first
    assert runs.said["full, resumed"] == ["done", "done"]
    assert RunFolder(runs.folder / "full").finished


def test_no_pickles_and_whole_models(runs: Runs) -> None:
    for path in runs.folder.rglob("*"):
        assert path.suffix in ("", ".json", ".jsonl", ".safetensors", ".log", ".bin", ".txt", ".0", ".1", ".2", ".3")
        assert path.name != ".metadata"
    model = ts.load(runs.folder / "documents fsdp")
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2).shape == (1, 5)


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "another"])
def test_damaged_shards_are_refused(runs: Runs, tmp_path: Path, damage: str) -> None:
    shutil.copytree(runs.folder / "documents fsdp", tmp_path / "run")
    file = next((tmp_path / "run" / "state").glob("shards-*/shard-00002-*"))
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "another":
        shutil.copy(file, file.with_name("shard-00003-model-00001-of-00001.safetensors"))
    else:
        file.write_bytes(content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    config = replace(RunFolder(tmp_path / "run").config(), out=str(tmp_path / "run"), steps=9, parallel=None)
    with pytest.raises((ValueError, FileNotFoundError), match=r"shard-0000.*(nothing was changed|restore)"):
        train(config, progress=False, resume=True)


@pytest.mark.parametrize(
    ("name", "entry"), [("../shards-1", None), ("shards-1/../..", None), (None, "../x.safetensors"), (None, "x.bin")]
)
def test_names_that_lead_elsewhere_are_refused(
    runs: Runs, tmp_path: Path, name: str | None, entry: str | None
) -> None:
    shutil.copytree(runs.folder / "documents fsdp", tmp_path / "run")
    path = tmp_path / "run" / "state" / "state.json"
    state = json.loads(path.read_text())
    if name is not None:
        state["files"]["shards"]["name"] = name
    if entry is not None:
        state["files"]["shards"]["files"][0]["name"] = entry
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="name has to be that of a f"):
        RunFolder(tmp_path / "run").load()
