"""TrainConfig: strict, whole, and the same after a way through JSON. Recipes build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from trainshort.training.config import TrainConfig
from trainshort.training.recipes import RECIPES


def config(**fields: Any) -> TrainConfig:
    return TrainConfig(data="data", out="runs/x", **fields)


def test_json_and_back() -> None:
    one = config(lr=1, position_options={"slopes": (1.0, 2)}, model_options={"gated": True}, compile=False)
    assert TrainConfig.from_json(one.to_json()) == one
    assert one.lr == 1.0
    assert isinstance(one.lr, float)


def test_paths_are_texts() -> None:
    assert TrainConfig(data=Path("a") / "b", out="c").data == "a/b"  # type: ignore[arg-type]


def test_unknown_fields_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"TrainConfig has no field 'lenght'; did you mean 'length'\?"):
        TrainConfig.from_dict({"data": "a", "out": "b", "lenght": 3})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 2.5}, "steps must be int, got 2.5"),
        ({"steps": True}, "steps must be int, got True"),
        ({"lr": "fast"}, "lr must be float, got 'fast'"),
        ({"lr": float("nan")}, "lr must be finite"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"beta2": 1.0}, r"beta2 must lie in \[0, 1\)"),
        ({"model": "tinyy"}, "model must be one of tiny, .*; got 'tinyy'; did you mean 'tiny'?"),
        ({"optimizer": "sgd"}, "optimizer must be one of adamw, muon; got 'sgd'"),
        ({"batch_tokens": 1000}, r"multiple of length x accumulation \(512 x 1\), got 1000; the nearest is 1024"),
        ({"warmup": 1001}, r"warmup must be at most steps \(1000\), got 1001"),
        ({"model_options": {"vocab_size": 3}}, "may not set 'vocab_size': the data's tokenizer says it"),
        ({"model_options": {"d_model": 3}}, "may not set 'd_model': give it as a field of its own"),
        ({"model_options": [1]}, "model_options must be a dict"),
        ({"model_options": {"a": object()}}, "may hold what JSON knows"),
    ],
)
def test_refusals(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**fields)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_build(name: str) -> None:
    fields = config(model=name).model_fields(vocab_size=50257)
    with torch.device("meta"):
        model = ts.LanguageModel(ts.ModelConfig.from_dict(fields))
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    least, most = {
        "tiny": (7, 8),  # mostly this vocabulary's embedding
        "small": (29, 31),
        "small-124m": (123, 125),
        "medium-350m": (345, 360),
        "bloom-560m": (353, 355),  # 559 with BLOOM's vocabulary
        "paper-wikitext103": (245, 260),
        "paper-1.3b": (1300, 1400),
    }[name]
    assert least <= count <= most


def test_the_papers_shape() -> None:
    fields = ts.ModelConfig.from_dict(config(model="paper-wikitext103").model_fields(267735))
    assert (fields.num_layers, fields.d_model, fields.num_heads, fields.hidden) == (16, 1024, 8, 4096)
    assert (fields.activation, fields.dropout, fields.norm_place) == ("relu", 0.3, "pre")


def test_fields_go_before_the_recipe() -> None:
    own = {"num_layers": 7, "dropout": 0.0, "attention_dropout": 0.2}
    fields = config(model="tiny", **own, model_options={"norm": "rmsnorm"}).model_fields(300)
    assert fields["attention_dropout"] == 0.2
    assert fields["num_layers"] == 7
    assert fields["d_model"] == 128
    assert fields["norm"] == "rmsnorm"
    assert fields["vocab_size"] == 300


def test_only_learned_positions_have_a_length() -> None:
    assert config(position="learned", length=64, batch_tokens=64).model_fields(9)["max_length"] == 64
    assert config(position="alibi").model_fields(9)["max_length"] is None
