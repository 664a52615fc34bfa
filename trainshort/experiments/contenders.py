"""What a comparison compares: position methods, each with options of its own where it has some.

alibi                       the method as it is
alibi:biased_heads=6        with an option, values as JSON has them or as texts
rotary:base=500000,scaling=ntk,factor=4
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trainshort.common.checks import is_plain_name


@dataclass(frozen=True)
class Contender:
    """name: in tables, and the beginning of the names of its folders."""

    name: str
    position: str
    options: dict[str, Any]


def contender(text: str) -> Contender:
    """From what stands among the positions."""
    position, colon, rest = text.partition(":")
    if not colon:
        return Contender(position, position, {})
    options = dict(_option(each, text) for each in rest.split(","))
    name = "-".join([position, *(f"{option}={_shown(value)}" for option, value in options.items())])
    if not is_plain_name(name):
        raise ValueError(
            f"positions: {text!r} would make folders called {name!r}: only letters, digits and plain signs can stand "
            "in options here (other values: trainshort train --set)"
        )
    return Contender(name, position, options)


def _option(text: str, entry: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name and value):
        raise ValueError(
            f"positions: options must look like alibi:biased_heads=6, with commas between; got {entry!r}"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
