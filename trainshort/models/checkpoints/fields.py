"""The config.json of a stranger: sizes, flags and numbers, each checked as it is asked for.

Public configs hold many fields that only training or another library reads. Those are not looked at; a field that
changes what the model computes is asked for, and refused if it says something that is not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainshort.common.checks import is_finite, is_whole
from trainshort.common.messages import shown

LARGEST = 2**24  # of any size: far above every public model
MOST_HEADS = 2**12

# What configs call activations, and what ModelConfig does.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


class Fields:
    """Fields of a config. One that is there but null counts as absent."""

    def __init__(self, values: Mapping[str, Any], path: Path, inside: str = "") -> None:
        """inside: the name of the object in the file that holds these fields, such as "attn_config."."""
        self.values, self.path, self.inside = values, path, inside

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def size(self, *names: str, default: int | None = None, most: int = LARGEST) -> int:
        """The first of these names that is there: older files have other names for the same size."""
        for name in names:
            if name in self:
                value = self.values[name]
                if not is_whole(value, 1, most):
                    raise self.error(name, f"must be a whole number from 1 to {most:,}")
                return int(value)
        if default is None:
            raise ValueError(f"{self.path}: {self.inside}{' or '.join(names)} is missing")
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.values[name] if name in self else default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self.values[name] if name in self else default
        if value is not None and not is_finite(value):
            raise self.error(name, "must be a finite number")
        return value

    def epsilon(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value is None or not 0 <= value < 1:
            raise self.error(name, "must lie in [0, 1)")
        return float(value)

    def activation(self, name: str, default: str) -> str:
        value = self.values[name] if name in self else default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(name, f"must be one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a field that is there and says something else."""
        if name in self and self.values[name] not in allowed:
            raise self.error(name, f"is implemented as {' or '.join(repr(each) for each in allowed)} only")

    def inner(self, name: str) -> Fields:
        """The fields of an object inside the config."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return Fields(value or {}, self.path, f"{self.inside}{name}.")

    def error(self, name: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {self.inside}{name} {problem}; got {shown(self.values.get(name))}")
