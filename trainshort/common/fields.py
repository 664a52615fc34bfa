"""The entries of a JSON object from a stranger, asked for by name and kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainshort.common.checks import LARGEST_EXACT, is_digest, is_finite, is_whole
from trainshort.common.messages import shown


class Fields:
    """A JSON object whose entries are asked for by name and kind; each error names the file and the entry."""

    def __init__(self, values: Mapping[str, Any], where: str, what: str) -> None:
        """where: the file, and the entry in it; what: what to do about an error."""
        self.values, self.where, self.what = values, where, what

    def whole(self, name: str, low: int = 0, high: int = LARGEST_EXACT) -> int:
        allowed = f"a whole number of at least {low:,}" if high == LARGEST_EXACT else f"from {low:,} to {high:,}"
        found: int = self._checked(name, lambda value: is_whole(value, low, high), allowed)
        return found

    def number(self, name: str, low: float = 0.0) -> float:
        allowed = f"a finite number of at least {low:g}"
        return float(self._checked(name, lambda value: is_finite(value) and value >= low, allowed))

    def text(self, name: str) -> str:
        found: str = self._checked(name, lambda value: isinstance(value, str), "a text")
        return found

    def flag(self, name: str) -> bool:
        found: bool = self._checked(name, lambda value: isinstance(value, bool), "true or false")
        return found

    def digest(self, name: str) -> str:
        found: str = self._checked(name, is_digest, "a sha256 in hexadecimal digits")
        return found

    def list(self, name: str) -> list[Any]:
        found: list[Any] = self._checked(name, lambda value: isinstance(value, list), "a list")
        return found

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        found: str = self._checked(name, lambda value: value in allowed, f"one of {', '.join(allowed)}")
        return found

    def object(self, name: str) -> Fields:
        values = self._checked(name, lambda value: isinstance(value, dict), "an object")
        return Fields(values, f"{self.where}: {name}", self.what)

    def refuse(self, problem: str) -> ValueError:
        """The error that says so, to be raised."""
        return ValueError(f"{self.where}: {problem}; {self.what}")

    def _checked(self, name: str, fits: Callable[[Any], bool], allowed: str) -> Any:
        if name not in self.values:
            raise self.refuse(f"{name} is missing")
        value = self.values[name]
        if not fits(value):
            raise self.refuse(f"{name} has to be {allowed}, got {shown(value)}")
        return value
