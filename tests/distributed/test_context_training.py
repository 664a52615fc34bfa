"""Training with rows that processes share: the losses and weights of one process, beside ddp and fsdp."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launched import folder_of_all_workers, run_cases
from tests.distributed.test_training import assert_close_runs
from tests.training.small import small_config, small_data
from trainshort.training.config import TrainConfig
from trainshort.training.run import RunFolder
from trainshort.training.train import train

pytestmark = pytest.mark.slow

VARIANTS: dict[str, dict[str, Any]] = {
    "slopes": {"position_options": {"trainable": True}, "length": 301, "batch_tokens": 4 * 301, "eval_tokens": 301},
    # Documents of several rows are packed into one, and cross from rank to rank.
    "documents": {"packing": "documents", "batch_tokens": 160, "accumulation": 1},
    "gates": {
        "position": "fox",
        "model_options": {"kv_shift": True, "qk_norm": True},
        "activation_checkpointing": True,
    },
    "bfloat16": {"dtype": "bfloat16"},
    "learned": {"position": "learned"},
    "small": {},
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "divides": (
        {},
        {"context_parallel": 3},
        "is 3, the number of processes that share a row: it has to divide the number of all, 2",
    ),
    "alike": ({"odd_rank": 1, "odd_config": {"context_parallel": 1}}, {}, "rank 1 has another context_parallel"),
}
FOUR = [("ddp", "slopes"), ("fsdp", "slopes"), ("ddp", "documents"), ("fsdp", "gates")]
TWO = [("ddp", "slopes"), ("ddp", "gates"), ("fsdp", "documents"), ("ddp", "bfloat16"), ("fsdp", "learned")]


def config_of(folder: Path, name: str, **changes: Any) -> TrainConfig:
    fields = {"dropout": 0.0, "batch_tokens": 256, "steps": 4, **changes}
    return small_config(folder / "data", folder / name, **fields)


def case(folder: Path, name: str, more: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**more, "train": config_of(folder, name, **{"context_parallel": 2, **changes}).to_dict()}


def cases_of(folder: Path, processes: int) -> dict[str, dict[str, Any]]:
    found = {}
    for kind, name in FOUR if processes == 4 else TWO:
        full = f"{processes} {kind} {name}"
        found[full] = case(folder, full, {}, parallel=kind, **VARIANTS[name])
    if processes == 4:
        return found | {
            "stopped": case(folder, "stopped", {"stop_after": 3}, context_parallel=4, **VARIANTS["slopes"])
        }
    for name, again in (("dropout", False), ("dropout, recomputed", True)):
        found[name] = case(folder, name, {}, attention_dropout=0.3, activation_checkpointing=again)
    return found | {name: case(folder, name, more, **changes) for name, (more, changes, _) in REFUSED.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """The folder of all runs, and what each rank said of them."""
    with folder_of_all_workers(tmp_path_factory, "context") as folder:
        if not (done := folder / "said.json").exists():
            small_data(folder)
            for name, changes in VARIANTS.items():
                train(config_of(folder, f"plain {name}", **changes), progress=False)
            said: dict[str, list[Any]] = {}
            for processes in (4, 2):
                cases = cases_of(folder, processes)
                said |= dict(zip(cases, run_cases(processes, list(cases.values()), folder), strict=True))
            done.write_text(json.dumps(said))
        return folder, json.loads(done.read_text())


@pytest.mark.parametrize(
    "name", [f"4 {kind} {name}" for kind, name in FOUR] + [f"2 {kind} {name}" for kind, name in TWO]
)
def test_ranks_that_share_rows_train_what_one_trains(runs: tuple[Path, dict[str, list[Any]]], name: str) -> None:
    folder, said = runs
    processes, _, variant = name.split()
    assert said[name] == ["done"] * int(processes)
    tolerance = 2e-3 if variant == "bfloat16" else 5e-6
    assert_close_runs(folder / name, folder / f"plain {variant}", tolerance)


def test_one_process_goes_on_with_a_run_of_shared_rows(runs: tuple[Path, dict[str, list[Any]]]) -> None:
    folder, said = runs
    assert said["stopped"] == ["interrupted"] * 4
    stopped = folder / "stopped"
    with pytest.raises(ValueError, match="is 4, the number of processes that share a row: here is one"):
        train(replace(RunFolder(stopped).config(), parallel=None), progress=False, resume=True)
    train(replace(RunFolder(stopped).config(), context_parallel=1), progress=False, resume=True)
    assert_close_runs(stopped, folder / "plain slopes", 5e-6)


def test_attention_dropout(runs: tuple[Path, dict[str, list[Any]]]) -> None:
    """A backward pass that computes attention again drops the same weights."""
    folder, said = runs
    assert said["dropout"] == said["dropout, recomputed"] == ["done"] * 2
    assert_close_runs(folder / "dropout", folder / "dropout, recomputed", 5e-6)
    with pytest.raises(AssertionError):  # what it would be if nothing was dropped
        assert_close_runs(folder / "dropout", folder / "plain small", 5e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_is_refused(runs: tuple[Path, dict[str, list[Any]]], name: str) -> None:
    said, sentence = runs[1][name], REFUSED[name][2]
    assert all("Error: " in each for each in said)
    assert any(sentence in each for each in said), said
    assert not (runs[0] / name / "train.json").exists()
