"""Options of position methods: plain values as JSON has them, and one clear error for each that cannot be."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

import trainshort as ts
from trainshort.positions import POSITIONS, Shape, build_position, plain_options
from trainshort.positions.options import KINDS

SHAPE = Shape(d_model=16, num_heads=2, head_dim=8, max_length=32, causal=False)
NUMBER = "a finite number"
INT = "an int from 1 to 2147483647"
FLAG = "True or False"
LIST = "a list of numbers, or None"


@pytest.mark.parametrize("name", POSITIONS)
def test_it_is_known_what_every_option_may_be(name: str) -> None:
    annotations = [p.annotation for p in inspect.signature(POSITIONS[name]).parameters.values()]
    assert annotations[0] == "Shape"
    assert set(annotations[1:]) <= set(KINDS)


@pytest.mark.parametrize(
    ("name", "option", "values", "allowed"),
    [
        ("rotary", "base", [math.nan, math.inf, "10000", True, None, [1e4], 10**400], NUMBER),
        ("sinusoidal", "base", [math.nan, math.inf, "10000", True, None, [1e4]], NUMBER),
        ("alibi", "scale", [math.nan, math.inf, "1", True, None, [1.0], torch.ones(2)], NUMBER),
        ("alibi", "trainable", [1, 0, "no", None, 1.0, torch.tensor(1)], FLAG),
        ("alibi", "one_sided", [1, "yes", None], FLAG),
        ("alibi", "slopes", [0.5, "ab", ["0.5", "0.25"], [True, True], [None, None], b"ab", {0.5, 0.25}], LIST),
        ("alibi", "slopes", [torch.ones(2, 1), torch.ones(()), torch.ones(2, dtype=torch.bool)], LIST),
        ("alibi", "slopes", [np.array(["a", "b"]), torch.ones(2, device="meta"), {"a": 1}, [1j, 1j]], LIST),
        ("t5", "buckets", [0, -3, 2.5, math.nan, "32", True, None, 10**30, [32]], INT),
        ("t5", "max_distance", [0, -3, 128.0, math.nan, math.inf, "128", True, None, 10**30], INT),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(name: str, option: str, values: list[Any], allowed: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match="must be") as error:
            build_position(name, SHAPE, {option: value})
        assert f"position '{name}': option '{option}' must be {allowed}; got {value!r}" == str(error.value)


@pytest.mark.parametrize("options", [None, "base", 3, [("base", 1e4)]], ids=str)
def test_options_are_a_mapping(options: Any) -> None:
    with pytest.raises(ValueError, match="position_options must be a dict"):
        build_position("rotary", SHAPE, options)


@pytest.mark.parametrize("make", [torch.tensor, np.array, tuple], ids=["tensor", "array", "tuple"])
def test_slopes_of_any_kind_are_the_same_slopes(make: Any) -> None:
    slopes = [0.7, 0.3]
    bias = build_position("alibi", SHAPE, {"slopes": make(slopes)}).bias()
    assert isinstance(bias, ts.LinearBias)
    assert torch.equal(bias.slopes, torch.tensor(slopes))


def test_plain_options_are_new_and_plain() -> None:
    given = {"slopes": (torch.tensor(0.5), np.float32(0.25)), "scale": 2}
    plain = plain_options("alibi", given)
    assert plain == {"slopes": [0.5, 0.25], "scale": 2}
    assert [type(slope) for slope in plain["slopes"]] == [float, float]
    assert isinstance(given["slopes"], tuple)
