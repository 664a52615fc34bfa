"""What an evaluation refuses, and says."""

from __future__ import annotations

from typing import Any

import pytest

from trainshort.evaluation.config import EvaluateConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lengths": (0,)}, "lengths must be at least 1"),
        ({"lengths": (16,), "mode": "slide"}, "mode must be one of nonoverlapping, sliding"),
        ({"lengths": (16,), "stride": 4}, "stride is for mode sliding"),
        ({"lengths": (64, 16), "mode": "sliding", "stride": 17}, "at most the shortest length, 16"),
        ({"lengths": (16,), "mode": "sliding", "stride": 0}, "stride must be at least 1"),
        ({"lengths": (16,), "tokens": 0}, "tokens must be at least 1"),
        ({"lengths": (16,), "chunk": 100}, "chunk must be a multiple of 128"),
        ({"lengths": (16,), "dtype": "int8"}, "dtype must be one of"),
        ({"lengths": (16,), "split": "test"}, "split must be one of validation, train"),
        ({"lengths": (True,)}, "lengths must be at least 1"),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluateConfig(**values)


def test_there_and_back() -> None:
    config = EvaluateConfig(lengths=(16, 32, 16), mode="sliding", stride=8)
    assert config.lengths == (16, 32)
    assert EvaluateConfig.from_json(config.to_json()) == config


def test_unknown_fields_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="no field 'lenghts'; did you mean 'lengths'"):
        EvaluateConfig.from_dict({"lenghts": [1]})


def test_strides() -> None:
    assert EvaluateConfig(lengths=(16,)).stride_of(16) == 16
    assert EvaluateConfig(lengths=(16,), mode="sliding").stride_of(16) == 8
    assert EvaluateConfig(lengths=(1,), mode="sliding").stride_of(1) == 1
