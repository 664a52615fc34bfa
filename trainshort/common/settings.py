"""What all configs have in common: strict types, strict names, and a way to JSON and back."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Self

from trainshort.common.messages import did_you_mean, shown
from trainshort.common.reading import parse_json

_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def check_type(name: str, declared: str, value: object) -> None:
    """Refuse a value that is not what the field of that name is declared as, if that is int, float, bool or str.

    Booleans are no numbers and strings are neither: JSON written by hand often has it otherwise.
    """
    kind = declared.removesuffix(" | None")
    if value is None and kind != declared:
        return
    wanted = _KINDS.get(kind)
    if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool")):
        raise ValueError(f"{name} must be {declared}, got {shown(value)}")


class Settings:
    """Mixed into a frozen dataclass: unknown names are refused, and `check` refuses values of other types.

    Fields are declared as int, float, bool, str, `... | None`, `tuple[str, ...]` or a Mapping. Metadata: `choices`
    lists what is allowed, `least` the smallest allowed number.
    """

    def check(self) -> None:
        """Check every field: call it from __post_init__."""
        for each in fields(self):  # type: ignore[arg-type]
            declared, value = str(each.type), getattr(self, each.name)
            kind = declared.removesuffix(" | None")
            if value is None and kind != declared:
                continue
            if kind == "tuple[str, ...]":
                if isinstance(value, str) or not isinstance(value, (tuple, list)):
                    raise ValueError(f"{each.name} must be a list of texts, got {value!r}")
                value = tuple(str(item) for item in value)
                object.__setattr__(self, each.name, value)
            elif kind == "str" and hasattr(value, "__fspath__"):
                value = str(value)
                object.__setattr__(self, each.name, value)
            check_type(each.name, declared, value)
            if kind == "int" and abs(value) >= 2**63:
                raise ValueError(f"{each.name} must be a number of at most 63 bits, got {shown(value)}")
            if kind == "float":
                if not abs(value) <= sys.float_info.max:  # also of whole numbers that no float can hold
                    raise ValueError(f"{each.name} must be finite, got {shown(value)}")
                object.__setattr__(self, each.name, float(value))
            self._check_metadata(each.name, value, each.metadata)

    @staticmethod
    def _check_metadata(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
        choices, least = metadata.get("choices"), metadata.get("least")
        if choices is not None and value not in choices:
            raise ValueError(
                f"{name} must be one of {', '.join(choices)}; got {shown(value)}{did_you_mean(value, choices)}"
            )
        if least is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {shown(value)}")

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON would give them back."""
        values = asdict(self)  # type: ignore[call-overload]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Strict: a field that does not exist is refused by name."""
        if not isinstance(values, Mapping):
            raise ValueError(f"a {cls.__name__} is made of a dict of fields and values, got {shown(values)}")
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                raise ValueError(f"{cls.__name__} has no field {name!r}{did_you_mean(name, known)}")
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(parse_json(text))
