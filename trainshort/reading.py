"""Reading files that may come from strangers: within limits of size and depth, and with errors that are sentences.

Every JSON file that the package reads goes through here, and every number in one that decides what is opened or how
much memory is taken. Imports nothing but Python's own library, so that every layer can use it.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LARGEST = 64 * 2**20  # bytes of a JSON file: nothing that we write comes near
DEEPEST = 64  # levels of objects and lists inside each other
LARGEST_NUMBER = 2**53  # of counts and places: beyond it JSON's numbers are not exact
SHOWN = 80  # characters of a value that an error quotes


def shown(value: object) -> str:
    """A value as an error quotes it: in one line, and short however large it is."""
    if isinstance(value, int) and abs(value) > 10**SHOWN:
        return "a number of more than 80 digits"
    if isinstance(value, (dict, list)) and len(value) > SHOWN:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value):,} entries"
    text = " ".join(repr(value[:SHOWN] if isinstance(value, str) else value).split())
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def file_size(path: Path, what: str) -> int:
    """The bytes of a file that is one: a pipe would never answer, and a device would never end."""
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path}: no such file; {what}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{shown(str(path))}: cannot be opened ({error}); {what}") from error
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path}: not a file (but a folder, a device or a pipe); {what}")
    return about.st_size


def read_text(path: Path, what: str, *, largest: int = LARGEST) -> str:
    """The text of a file of at most `largest` bytes; `what` says for errors what the file belongs to."""
    size = file_size(path, what)
    if size > largest:
        raise ValueError(f"{path}: has {size:,} bytes, and at most {largest:,} are read; {what}")
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"{path}: has more than {largest:,} bytes, and no more are read; {what}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not valid JSON (not UTF-8: {error.reason} at {error.start:,}); {what}") from None


def parse_json(text: str | bytes) -> Any:
    """What a JSON text holds; ValueError for all that is wrong with it, too deep ones included."""
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError(f"objects or lists nested more than {DEEPEST} deep") from None
    level, depth = [values], 0
    while level := [each for value in level for each in _inside(value)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"objects or lists nested more than {DEEPEST} deep")
    return values


def _inside(value: Any) -> list[Any]:
    """The objects and lists that a value holds."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in inner if isinstance(each, (dict, list))]


def read_json(path: Path, what: str, *, largest: int = LARGEST) -> dict[str, Any]:
    """The object in a JSON file; `what` says for errors what the file belongs to."""
    text = read_text(path, what, largest=largest)
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); {what}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds {type(values).__name__}, not a JSON object; {what}")
    return values


def is_whole(value: object, low: int = 0, high: int = LARGEST_NUMBER) -> bool:
    """Whether a value is a whole number from low to high; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_plain_name(value: object) -> bool:
    """Whether a value names a file inside its folder: no path, nothing hidden, nothing unprintable."""
    if not isinstance(value, str) or not value or len(value) > 255 or value.startswith("."):
        return False
    return value.isprintable() and not any(each in value for each in "/\\:")


def is_digest(value: object) -> bool:
    """Whether a value is a sha256 in hexadecimal digits."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


class Fields:
    """A JSON object whose entries are asked for by name and kind; each error names the file and the entry."""

    def __init__(self, values: Mapping[str, Any], where: str, what: str) -> None:
        """where: the file, and the entry in it; what: what to do about an error."""
        self.values, self.where, self.what = values, where, what

    def whole(self, name: str, low: int = 0, high: int = LARGEST_NUMBER) -> int:
        allowed = f"a whole number of at least {low:,}" if high == LARGEST_NUMBER else f"from {low:,} to {high:,}"
        found: int = self._checked(name, lambda value: is_whole(value, low, high), allowed)
        return found

    def number(self, name: str, low: float = 0.0) -> float:
        return float(
            self._checked(name, lambda value: _is_number(value, low), f"a finite number of at least {low:g}")
        )

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


def _is_number(value: object, low: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= 1e300 and math.isfinite(value) and value >= low
