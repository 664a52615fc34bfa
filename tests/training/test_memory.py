"""The arithmetic of docs/scale.md, beside tensors that are really kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainshort.models import LanguageModel, ModelConfig
from trainshort.training.memory import (
    Setting,
    activations_per_token,
    cache_bytes,
    models,
    parameters_of,
    table,
    training_memory,
)

DOCS = Path(__file__).parents[2] / "docs" / "scale.md"


def kept_by_backward(config: ModelConfig, rows: int, length: int) -> int:
    """Bytes of activations that the graph of a model's blocks holds, each storage once, without parameters."""
    model = LanguageModel(config)
    held: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.numel() >= rows * length:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    tokens = torch.randint(config.vocab_size, (rows, length))
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model.trunk(tokens).sum()
    return sum(held.values())


@pytest.mark.parametrize(
    "changes",
    [{}, {"activation": "relu"}, {"activation": "silu", "gated": True}, {"num_kv_heads": 2}],
    ids=str,
)
def test_activations_are_those_that_are_kept(changes: dict[str, Any]) -> None:
    """Of one layer more: what two models differ by. Weights in bfloat16 are counted elsewhere."""
    rows, length = 4, 512
    found = []
    for layers in (1, 3):
        config = ModelConfig(num_layers=layers, d_model=128, num_heads=4, vocab_size=64, **changes)
        found.append(kept_by_backward(config, rows, length))
    blocks, _ = parameters_of(config)
    measured = ((found[1] - found[0]) / 2 - 2 * blocks[0]) / (rows * length)
    assert measured == pytest.approx(activations_per_token(config), rel=0.15)


def test_sharding_divides_what_it_shards() -> None:
    config = models()["1.3B"]
    blocks, rest = parameters_of(config)
    assert 1.2e9 < sum(blocks) + rest < 1.4e9
    assert sum(parameters_of(models()["7B"])[0]) > 6e9
    alone = training_memory(config, Setting(length=1024))
    assert alone.state == 16 * (sum(blocks) + rest)
    for ranks in (1, 8, 64):
        shared = training_memory(config, Setting(length=1024, ranks=ranks, parallel="fsdp"))
        assert shared.state == pytest.approx(alone.state / ranks, abs=1)
        assert shared.activations == alone.activations
    split = training_memory(config, Setting(length=1024, context=4))
    assert split.activations == alone.activations / 4
    assert cache_bytes(config, 10) == 10 * 2 * 2 * 25 * 2048


def test_the_docs_have_the_table() -> None:
    assert table() in DOCS.read_text(), "python -m trainshort.training.memory prints it"
