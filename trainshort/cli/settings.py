"""Options of models and position methods from `--set NAME=VALUE`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def options_from(settings: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the model and of the position method, from texts such as gated=true."""
    model: dict[str, Any] = {}
    position: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ValueError(f"--set takes NAME=VALUE such as activation=silu, got {setting!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        into, name = (position, name.removeprefix("position.")) if name.startswith("position.") else (model, name)
        into[name] = value
    return model, position
