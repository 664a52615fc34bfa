"""A small folder of tokens and runs on it that take a fraction of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from trainshort.data.config import PrepareConfig
from trainshort.data.prepare import prepare
from trainshort.models import LanguageModel
from trainshort.training.config import TrainConfig
from trainshort.training.metrics import read_metrics

TIMES = ("seconds",)


def small_data(folder: Path) -> Path:
    """Forty short documents as bytes."""
    source = folder / "text"
    source.mkdir()
    for number in range(40):
        words = (f"document {number} has line {line}, which says {line * number % 17}." for line in range(8))
        (source / f"{number:02}.txt").write_text("\n".join(words))
    return prepare(PrepareConfig(sources=(str(source),), out=str(folder / "data"), validation_fraction=0.1))


def small_config(data: Path, out: Path, **changes: Any) -> TrainConfig:
    """Eight steps with dropout, so that random numbers matter."""
    fields: dict[str, Any] = {
        "num_layers": 2,
        "d_model": 16,
        "num_heads": 2,
        "dropout": 0.1,
        "attention_dropout": changes.get("dropout", 0.1),
        "length": 32,
        "batch_tokens": 128,
        "accumulation": 2,
        "steps": 8,
        "warmup": 2,
        "eval_every": 4,
        "eval_tokens": 128,
        "checkpoint_every": 3,
        "device": "cpu",
    }
    return TrainConfig(data=str(data), out=str(out), **{**fields, **changes})


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """All but the times."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in read_metrics(folder)]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint: weights, optimizer state, random numbers; and those of model.safetensors."""
    found = {}
    for path in [folder / "model.safetensors", *sorted((folder / "state").glob("*.safetensors"))]:
        kind = path.name.split("-")[0]
        with safe_open(path, framework="pt") as file:
            found |= {f"{kind}/{name}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def assert_same_run(left: Path, right: Path) -> None:
    """The same losses, and the same bits in every tensor."""
    assert metrics_of(left) == metrics_of(right)
    one, other = tensors_of(left), tensors_of(right)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert tensor.numpy().tobytes() == other[name].numpy().tobytes(), name


def count_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that training compiles from now on, run as they are. any_shape: compiled for more than one shape."""
    torch.compiler.reset()
    found: list[Any] = []

    def count(graph: Any, example_inputs: Any) -> Any:
        found.append(graph)
        graph.any_shape = any(isinstance(each, torch.SymInt) for each in example_inputs)
        return graph.forward

    compile_blocks = LanguageModel.compile_blocks
    monkeypatch.setattr(
        LanguageModel, "compile_blocks", lambda model, **options: compile_blocks(model, backend=count, **options)
    )
    return found
