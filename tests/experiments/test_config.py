"""What a comparison refuses before any work is done, and the recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainshort.experiments.config import CompareConfig
from trainshort.experiments.recipes import BUDGETS, RECIPES
from trainshort.training.recipes import RECIPES as SIZES


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"positions": ()}, "positions must name at least one"),
        ({"length": (0,)}, "length must be whole numbers of at least 1"),
        ({"seeds": (-1,)}, "seeds must be whole numbers of at least 0"),
        ({"multiples": ()}, "at least one length to test at"),
        ({"test_lengths": (16,), "length": (32,)}, "at least the training length 32"),
        ({"lrs": ("rotary",)}, "lrs must look like rotary=0.002, got 'rotary'"),
        ({"lrs": ("rotary=fast",)}, "lrs must look like rotary=0.002"),
        ({"lrs": ("learned=0.1",)}, "lrs names 'learned', which is not among the positions"),
        ({"length": (100,)}, "batch_tokens must be a multiple of length"),
        ({"model": "huge"}, "model must be one of tiny"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"mode": "sliding", "stride": 1000}, "stride must be at most the shortest length"),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompareConfig(**values)


def test_there_and_back() -> None:
    config = CompareConfig(positions=("alibi", "none"), length=(32, 64), seeds=(0, 1), lrs=("none=0.1",))
    assert CompareConfig.from_json(config.to_json()) == config


def test_nothing_differs_between_methods_but_the_learning_rate() -> None:
    config = CompareConfig(lrs=("rotary=0.002",), seeds=(0, 1))
    assert len(config.runs()) == 8
    base = config.training("data", "alibi", 128, 0)
    other = config.training("data", "rotary", 128, 0)
    assert sorted(change.split()[0] for change in base.differences(other)) == ["lr", "position"]
    assert other.lr == 0.002
    assert base.lr == config.lr
    assert len({config.training("data", *run).out for run in config.runs()}) == 8


def test_test_lengths_below_the_trained_one_are_left_out() -> None:
    config = CompareConfig(length=(64, 128), test_lengths=(128, 64, 256))
    assert config.lengths_for(64) == (64, 128, 256)
    assert config.lengths_for(128) == (128, 256)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_whole_config_at_every_size(name: str, size: str) -> None:
    config = RECIPES[name](size)
    assert config.model == size
    for position, length, seed in config.runs():
        assert config.training("data", position, length, seed).model == size
        assert config.evaluation(length).lengths[0] == length


def test_every_size_has_a_budget() -> None:
    assert set(BUDGETS) == set(SIZES)


def test_figure1_is_the_papers() -> None:
    config = RECIPES["figure1"]()
    assert set(config.positions) == {"sinusoidal", "rotary", "t5", "alibi"}
    assert config.length == (512, 1024)
    assert max(config.test_lengths) == 16384
    assert config.mode == "nonoverlapping"


def test_demo_tests_at_many_times_the_length() -> None:
    config = RECIPES["demo"]()
    assert config.data is None
    assert len(config.positions) == 4
    assert config.lengths_for(config.length[0])[-1] == 256 * config.length[0]
    assert config.test_tokens is not None
    assert config.test_tokens % (256 * config.length[0]) == 0  # whole windows of every length
    assert not config.lrs


def test_methods_with_options_are_contenders_of_their_own() -> None:
    positions = ("alibi", "alibi:biased_heads=6", "fox:gate_bias=5,rotary=true", "rotary:scaling=ntk,factor=4")
    config = CompareConfig(positions=positions, lrs=("alibi:biased_heads=6=0.002",))
    found = [config.training("data", *run) for run in config.runs()]
    assert [each.position for each in found] == ["alibi", "alibi", "fox", "rotary"]
    assert [each.position_options for each in found] == [
        {},
        {"biased_heads": 6},
        {"gate_bias": 5, "rotary": True},
        {"scaling": "ntk", "factor": 4},
    ]
    assert [each.lr for each in found] == [config.lr, 0.002, config.lr, config.lr]
    assert [each.name for each in found] == [
        None,
        "alibi-biased_heads=6",
        "fox-gate_bias=5-rotary=true",
        "rotary-scaling=ntk-factor=4",
    ]
    assert [Path(each.out).name for each in found][:2] == ["alibi-128-seed0", "alibi-biased_heads=6-128-seed0"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("alibi:", "must look like alibi:biased_heads=6"),
        ("alibi:biased_heads", "must look like alibi:biased_heads=6"),
        ("alibi:slopes=a/b", "only letters, digits and plain signs"),
    ],
)
def test_options_that_are_none(entry: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompareConfig(positions=("alibi", entry))
