"""ModelConfig: frozen, strict, and clear about what it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainshort as ts
from tests.models.small import EVERY_POSITION

RICH: dict[str, Any] = {
    "vocab_size": 1000,
    "d_model": 96,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 24,
    "d_ff": 100,
    "position": "alibi",
    "position_options": {"slopes": [0.5, 0.25, 0.1, 0.3, 0.2, 0.05], "trainable": True, "scale": 0.5},
    "max_length": 77,
    "causal": True,
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "norm_place": "pre",
    "second_residual": False,
    "parallel_residual": True,
    "parallel_norms": True,
    "embedding_norm": True,
    "final_norm": False,
    "activation": "gelu_tanh",
    "gated": True,
    "qkv_bias": True,
    "attention_out_bias": True,
    "ffn_bias": True,
    "ffn_out_bias": True,
    "head_bias": True,
    "clip_qkv": 6.0,
    "attention_scale": 0.125,
    "qk_norm": True,
    "wide_qk_norm": False,
    "kv_shift": True,
    "output_norm": True,
    "output_gate": True,
    "tie_embeddings": False,
    "token_types": 2,
    "masked_head": False,
    "dropout": 0.1,
    "attention_dropout": 0.2,
}


def test_the_defaults_make_a_model() -> None:
    config = ts.ModelConfig()
    assert config.position == "alibi"
    assert config.causal
    ts.LanguageModel(config)


def test_it_is_frozen() -> None:
    config = ts.ModelConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_it_takes_keywords_only() -> None:
    with pytest.raises(TypeError):
        ts.ModelConfig(256)  # pyright: ignore[reportCallIssue]


def test_it_does_not_share_the_options_it_was_given() -> None:
    options = {"trainable": True}
    config = ts.ModelConfig(position_options=options)
    options["trainable"] = False
    options["wavelength"] = 3
    assert config.position_options == {"trainable": True}
    config.to_dict()["position_options"]["trainable"] = False
    assert config.position_options == {"trainable": True}


def test_equal_configs_are_equal() -> None:
    assert ts.ModelConfig(**RICH) == ts.ModelConfig(**RICH)
    assert ts.ModelConfig(**RICH) != ts.ModelConfig(**(RICH | {"dropout": 0.2}))


# What follows from what


def test_what_is_left_out_follows() -> None:
    config = ts.ModelConfig(d_model=96, num_heads=6)
    assert config.width == 16
    assert config.kv_heads == 6
    assert config.hidden == 384
    assert config.score_scale == 0.25


def test_what_is_given_counts() -> None:
    config = ts.ModelConfig(**RICH)
    assert config.width == 24
    assert config.kv_heads == 2
    assert config.hidden == 100
    assert config.score_scale == 0.125
    assert ts.ModelConfig(d_model=10, num_heads=4, head_dim=9).score_scale == pytest.approx(1 / 3)


# JSON


def test_rich_really_changes_every_field() -> None:
    default = ts.ModelConfig(head_dim=None).to_dict()
    assert set(RICH) == set(default)
    same = {name for name, value in RICH.items() if value == default[name]}
    assert same == {"position", "causal", "norm_place", "second_residual", "wide_qk_norm"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        RICH,
        {"causal": False, "norm_place": "post", "second_residual": True, "wide_qk_norm": True},
        *({"position": p, "max_length": 9} for p in EVERY_POSITION),
    ],
)
def test_json_round_trip(fields: dict[str, Any]) -> None:
    config = ts.ModelConfig(**fields)
    assert ts.ModelConfig.from_json(config.to_json()) == config
    assert ts.ModelConfig.from_dict(config.to_dict()) == config
    assert set(json.loads(config.to_json())) == {field.name for field in dataclasses.fields(ts.ModelConfig)}


def test_json_round_trip_of_a_tuple() -> None:
    """JSON knows lists alone: what comes back must still be the same config."""
    config = ts.ModelConfig(num_heads=2, position_options={"slopes": (0.5, 0.25)})
    assert ts.ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    "slopes",
    [
        torch.tensor([0.5, 0.1]),
        torch.tensor([0.5, 0.1], dtype=torch.float64),
        torch.tensor([0.5, 0.1], dtype=torch.bfloat16, requires_grad=True),
        torch.nn.Parameter(torch.tensor([0.5, 0.1])),
        tuple(torch.tensor([0.5, 0.1])),
        np.array([0.5, 0.1]),
        np.array([0.5, 0.1], dtype=np.float32),
        [np.float32(0.5), np.float64(0.1)],
        (1, 2),
        range(1, 3),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}",
)
def test_position_options_become_what_json_knows(slopes: Any) -> None:
    config = ts.ModelConfig(num_heads=2, position_options={"slopes": slopes})
    stored = config.position_options["slopes"]
    assert type(stored) is list
    assert all(type(slope) in (int, float) for slope in stored)
    assert stored == [getattr(slope, "item", lambda slope=slope: slope)() for slope in slopes]
    assert ts.ModelConfig.from_json(config.to_json()) == config
    assert ts.ModelConfig.from_dict(config.to_dict()) == config


def test_scalars_of_arrays_become_numbers_and_flags() -> None:
    options = {"scale": torch.tensor(0.5), "trainable": np.True_}
    config = ts.ModelConfig(position_options=options)
    assert config.position_options == {"scale": 0.5, "trainable": True}
    assert [type(value) for value in config.position_options.values()] == [float, bool]
    t5 = ts.ModelConfig(position="t5", position_options={"buckets": np.int64(16)})
    assert ts.ModelConfig.from_json(t5.to_json()) == t5


def test_it_does_not_share_a_list_it_was_given() -> None:
    slopes = [0.5, 0.25]
    config = ts.ModelConfig(num_heads=2, position_options={"slopes": slopes})
    slopes[0] = 7.0
    assert config.position_options == {"slopes": [0.5, 0.25]}


def test_a_model_made_with_a_tensor_of_slopes_can_be_saved(tmp_path: Path) -> None:
    slopes = torch.tensor([0.7, 0.3])
    model = ts.LanguageModel(ts.ModelConfig(num_heads=2, num_layers=1, position_options={"slopes": slopes}))
    ts.save(model, tmp_path)
    found = ts.load(tmp_path)
    assert found.config == model.config
    bias = found.position.bias()
    assert isinstance(bias, ts.LinearBias)
    assert torch.equal(bias.slopes, slopes)


def test_from_dict_fills_in_defaults() -> None:
    assert ts.ModelConfig.from_dict({"d_model": 64}) == ts.ModelConfig(d_model=64)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("num_layer", "num_layers"), ("dmodel", "d_model"), ("postion", "position"), ("n_heads", "num_heads")],
)
def test_an_unknown_field_suggests_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"no field '{wrong}'; did you mean '{near}'\?"):
        ts.ModelConfig.from_dict({"d_model": 64, wrong: 8})


def test_a_field_like_no_other_is_named() -> None:
    with pytest.raises(ValueError, match=r"no field 'xyzzy'$"):
        ts.ModelConfig.from_dict({"xyzzy": 1})


# What is refused


@pytest.mark.parametrize(
    "name", ["vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff", "max_length"]
)
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
def test_sizes_are_positive_ints(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive int, got {value!r}"):
        ts.ModelConfig.from_dict({name: value})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"d_model": 100, "num_heads": 8}, r"multiple of num_heads .* got d_model 100 and num_heads 8"),
        ({"num_heads": 8, "num_kv_heads": 3}, r"multiple of num_kv_heads, got 8 and 3"),
        ({"num_heads": 2, "num_kv_heads": 4}, r"multiple of num_kv_heads, got 2 and 4"),
        ({"activation": "swish"}, r"activation must be one of relu, gelu, gelu_tanh, silu; got 'swish'"),
        ({"norm": "batchnorm"}, r"norm must be one of layernorm, layernorm_without_bias, rmsnorm; got 'batchnorm'"),
        ({"norm_place": "middle"}, r"norm_place must be one of pre, post; got 'middle'"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"attention_dropout": 1.0}, r"attention_dropout must lie in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"dropout must lie in \[0, 1\), got -0.1"),
        ({"dropout": math.nan}, r"dropout must lie in \[0, 1\), got nan"),
        ({"clip_qkv": 0.0}, r"clip_qkv must be positive or None, got 0.0"),
        ({"clip_qkv": -3.0}, r"clip_qkv must be positive or None, got -3.0"),
        ({"clip_qkv": math.nan}, r"clip_qkv must be positive or None, got nan"),
        ({"norm_place": "post", "parallel_residual": True}, r"parallel_residual needs norm_place 'pre'"),
        ({"parallel_norms": True}, r"parallel_norms needs parallel_residual"),
        ({"second_residual": True}, r"second_residual needs norm_place 'post'"),
        ({"qk_norm": True, "wide_qk_norm": True}, r"qk_norm and wide_qk_norm"),
        ({"position": "alibbi"}, r"got 'alibbi'; did you mean 'alibi'\?"),
        ({"position_options": {"trainabel": True}}, r"position 'alibi' has no option 'trainabel'"),
        ({"position_options": {"slopes": [0.5]}}, r"each of 8 heads, got 1"),
        ({"position": "learned"}, r"learned positions need max_length"),
        ({"position": "rotary", "d_model": 24, "num_heads": 8}, r"rotary positions need an even head_dim, got 3"),
        ({"position": "sinusoidal", "d_model": 27, "num_heads": 3}, r"even d_model, got 27"),
        ({"norm_eps": -1.0}, r"norm_eps .*-1.0"),
        ({"norm_eps": math.nan}, r"norm_eps .*nan"),
        ({"attention_scale": math.nan}, r"attention_scale .*nan"),
        ({"attention_scale": math.inf}, r"attention_scale .*inf"),
        ({"token_types": -1}, r"token_types .*-1"),
        ({"token_types": 1.5}, r"token_types .*1.5"),
        ({"token_types": True}, r"token_types must be int, got True"),
        ({"token_types": "2"}, r"token_types must be int, got '2'"),
        ({"dropout": math.inf}, r"dropout must lie in \[0, 1\), got inf"),
        ({"dropout": -math.inf}, r"dropout must lie in \[0, 1\), got -inf"),
        ({"dropout": True}, r"dropout must be float, got True"),
        ({"clip_qkv": math.inf}, r"clip_qkv must be finite, got inf"),
        ({"norm_eps": math.inf}, r"norm_eps must be finite, got inf"),
        ({"norm_eps": 10**400}, r"norm_eps must be finite, got 1000"),
        ({"d_model": 10**30}, r"d_model must be a positive int of at most 2147483647, got 10{30}$"),
        ({"token_types": 10**30}, r"token_types must lie in \[0, 2147483647\], got 10{30}$"),
        ({"position_options": None}, r"position_options must be a dict of options .*, got None"),
        ({"position_options": "base"}, r"position_options must be a dict of options .*, got 'base'"),
        ({"position_options": [1]}, r"position_options must be a dict of options .*, got \[1\]"),
        ({"position_options": {"trainable": "no"}}, r"option 'trainable' must be True or False; got 'no'"),
        ({"position": "t5", "position_options": {"buckets": -3}}, r"option 'buckets' must be an int from 1 .*got -3"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_built_is_refused_at_once(fields: dict[str, Any], match: str) -> None:
    for build in (lambda: ts.ModelConfig(**fields), lambda: ts.ModelConfig.from_dict(fields)):
        with pytest.raises(ValueError, match=match):
            build()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout", "0.1"),
        ("clip_qkv", "6"),
        ("norm_eps", "1e-5"),
        ("causal", "no"),
        ("gated", 1.5),
        ("qkv_bias", "false"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(name: str, value: object) -> None:
    """A config comes from JSON, where "false" is easily a string, and a string is true."""
    with pytest.raises((TypeError, ValueError), match=name):
        ts.ModelConfig.from_dict({name: value})


@pytest.mark.parametrize("values", [[], None, 3, "d_model", [["d_model", 64]]], ids=str)
def test_what_is_no_dict_of_fields(values: Any) -> None:
    for build in (lambda: ts.ModelConfig.from_dict(values), lambda: ts.ModelConfig.from_json(json.dumps(values))):
        with pytest.raises(ValueError, match=r"made of a dict of fields and values, got"):
            build()


@pytest.mark.parametrize("position", EVERY_POSITION)
def test_a_config_costs_no_random_numbers(position: str) -> None:
    """It builds a position method to see whether that can be, but the numbers of a seed belong to the model."""
    before = torch.get_rng_state()
    ts.ModelConfig(position=position, max_length=10)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_config_costs_no_memory() -> None:
    """A terabyte of learned positions is refused by the machine that has no terabyte, not by the config."""
    assert ts.ModelConfig(position="learned", d_model=2**10, max_length=2**28).max_length == 2**28


@pytest.mark.parametrize("text", ["", "{", "nonsense"])
def test_text_that_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="Expecting"):
        ts.ModelConfig.from_json(text)


def test_the_kind_of_model_must_fit() -> None:
    with pytest.raises(ValueError, match="causal=True"):
        ts.LanguageModel(ts.ModelConfig(causal=False))
    with pytest.raises(ValueError, match="causal=False"):
        ts.Encoder(ts.ModelConfig())


@pytest.mark.parametrize("kind", [ts.LanguageModel, ts.Encoder])
def test_what_is_no_config_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"config must be a ModelConfig, got dict: pass ModelConfig\(\*\*fields\)"):
        kind({"d_model": 64})
    with pytest.raises(TypeError, match=r"got str: pass ModelConfig\(\.\.\.\)"):
        kind("small-124m")
