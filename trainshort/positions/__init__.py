"""Position methods: one file a method, one class with a few hooks, one table of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainshort.common.messages import nearest
from trainshort.positions.imported import import_file, installed, installed_names
from trainshort.positions.options import check_options
from trainshort.positions.position import Position, Shape
from trainshort.positions.table import OTHER_NAMES, POSITIONS

__all__ = ["POSITIONS", "Position", "Shape", "build_position", "import_file", "is_known", "plain_options"]


def build_position(name: str, shape: Shape, options: Mapping[str, Any]) -> Position:
    """The position method of that name, for a model of that shape."""
    return _method(name)(shape, **plain_options(name, options))


def plain_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of that method as JSON would give them back, or an error that says which one cannot be."""
    return check_options(name, _method(name), options)


def is_known(name: str) -> bool:
    """Whether there is a method of that name: ours, an imported one or one of an installed package."""
    return name in POSITIONS or name in installed_names()


def _method(name: str) -> type[Position]:
    method = POSITIONS.get(name) or installed(name)
    if method is None:
        known = [*POSITIONS, *(each for each in installed_names() if each not in POSITIONS)]
        raise ValueError(
            f"position must be one of {', '.join(known)}; got {name!r}{_meant(name, known)} A method of your own is "
            "made known by import_file (--import FILE.py)"
        )
    return method


def _meant(name: str, known: list[str]) -> str:
    """The end of the sentence: `; did you mean 'rotary'?` for what is near a name, or another name of it."""
    plain = "".join(letter for letter in str(name).lower() if letter.isalnum())
    found = OTHER_NAMES.get(plain) or nearest(str(name).lower(), known) or nearest(plain, known)
    return "." if found is None else f"; did you mean {found!r}?"
