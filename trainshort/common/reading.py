"""Reading files that may come from strangers: within limits of size and depth, and with errors that are sentences.

Every JSON file that the package reads goes through here.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from trainshort.common.messages import shown

LARGEST = 64 * 2**20  # bytes of a JSON file: nothing that we write comes near
DEEPEST = 64  # levels of objects and lists inside each other
POINTER = b"version https://git-lfs"  # how a file begins that stands for one of git-lfs


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


def refuse_pointer(path: Path) -> None:
    """In the place of a large file git leaves a few lines until git-lfs has fetched it."""
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise ValueError(f"{path}: a pointer of git-lfs, not the file that it stands for: run git lfs pull there")


def read_text(path: Path, what: str, *, largest: int = LARGEST) -> str:
    """The text of a file of at most `largest` bytes; `what` says for errors what the file belongs to."""
    size = file_size(path, what)
    if size > largest:
        raise ValueError(f"{path}: has {size:,} bytes, and at most {largest:,} are read; {what}")
    refuse_pointer(path)
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
