"""Position methods: one file a method, one class with three hooks, one table of names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from trainshort.positions.alibi import Alibi
from trainshort.positions.learned import Learned
from trainshort.positions.none import NoPosition
from trainshort.positions.options import check_options
from trainshort.positions.position import Position, Shape
from trainshort.positions.rotary import Rotary
from trainshort.positions.sinusoidal import Sinusoidal
from trainshort.positions.t5 import T5

__all__ = ["POSITIONS", "Position", "Shape", "build_position", "plain_options"]

POSITIONS: dict[str, type[Position]] = {
    "alibi": Alibi,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "t5": T5,
    "none": NoPosition,
}


def build_position(name: str, shape: Shape, options: Mapping[str, Any]) -> Position:
    """The position method of that name, for a model of that shape."""
    return _method(name)(shape, **plain_options(name, options))


def plain_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of that method as JSON would give them back, or an error that says which one cannot be."""
    return check_options(name, _method(name), options)


def _method(name: str) -> type[Position]:
    method = POSITIONS.get(name)
    if method is None:
        near = difflib.get_close_matches(str(name).lower(), POSITIONS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"position must be one of {', '.join(POSITIONS)}; got {name!r}{hint}")
    return method
