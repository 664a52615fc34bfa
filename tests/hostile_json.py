"""What a stranger may have done to a JSON file: every entry in turn dropped or replaced, and the file as a whole.

`survives` demands of a reader that each time it either works or raises an error of one sentence, and that it opens
nothing outside the folder that it was given.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

EVERY = [pytest.param(7, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
DEEP: Any = "deep"
for _ in range(500):
    DEEP = [DEEP]

VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "text": "words",
    "object dtype": "O",
    "empty text": "",
    "path out": "../../outside.bin",
    "absolute path": "/etc/passwd",
    "device": "/dev/zero",
    "null byte": "a\0b",
    "surrogate": "\ud800",
    "negative": -1,
    "huge": 10**9,
    "huger": 10**30,
    "hugest": 10**400,
    "fraction": 0.5,
    "not a number": float("nan"),
    "infinite": float("inf"),
    "list": [],
    "list of numbers": [1, 2, 3],
    "object": {},
    "deep": DEEP,
}
WHOLE: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"format": "trainsh',
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "not UTF-8": b"\xff\xfe\x00",
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "many digits": b'{"format": ' + b"9" * 10_000 + b"}",
    "zeros": b"\0" * 1000,
}

CODE = [*sysconfig.get_paths().values(), sys.base_prefix, str(Path(__file__).parents[1] / "trainshort")]
_watching: list[list[str]] = []
_hooked = False


def changed(values: Any) -> Iterator[tuple[str, bytes]]:
    """Every single change of the object, with what it is, as the bytes of a file."""
    for path in _paths(values):
        name = ".".join(map(str, path))
        yield f"{name} dropped", _dump(_with(values, path, None, drop=True))
        for what, value in VALUES.items():
            yield f"{name}: {what}", _dump(_with(values, path, value))
    text = _dump(values)
    yield from WHOLE.items()
    for place in range(1, len(text), max(1, len(text) // 7)):
        yield f"cut at {place}", text[:place]


def survives(file: Path, read: Callable[[], Any], *, home: Path, every: int = 1) -> None:
    """Put the changes into the file in turn, all or `every` so many of them, and read. The file is put back."""
    before = file.read_bytes()
    changes = list(changed(json.loads(before)))[::every]
    assert len(changes) > 5
    try:
        for what, content in changes:
            file.write_bytes(content)
            with opened() as paths:
                problem = _problem(read)
            assert problem is None, f"{what}: {problem}"
            outside = [path for path in paths if not _allowed(path, home)]
            assert not outside, f"{what}: opened {outside}"
    finally:
        file.write_bytes(before)


def _problem(read: Callable[[], Any]) -> str | None:
    """What is wrong with how it ends, if something is."""
    try:
        read()
    except BaseException as error:  # a panic of a library in another language is no Exception
        message, kind = str(error), type(error).__name__
        if type(error) not in (ValueError, FileNotFoundError, RuntimeError):
            return f"ends in {kind}: {message[:200]}"
        if " " not in message or "\n" in message or len(message) > 1000:
            return f"not a sentence: {message[:2000]!r}"
    return None


@contextmanager
def opened() -> Iterator[list[str]]:
    """The paths that Python opens meanwhile."""
    global _hooked
    if not _hooked:  # a hook stays for ever: there is one, which looks away unless somebody watches
        sys.addaudithook(_hook)
        _hooked = True
    paths: list[str] = []
    _watching.append(paths)
    try:
        yield paths
    finally:
        _watching.remove(paths)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watching and isinstance(arguments[0], (str, bytes, os.PathLike)):
        for paths in _watching:
            paths.append(os.fsdecode(arguments[0]))


def _allowed(path: str, home: Path) -> bool:
    """Inside the folder, or code of Python and its packages, which Python looks for in the places of sys.path."""
    if path in sys.path:
        return True
    full = os.path.abspath(path)
    return any(full.startswith(root) for root in (str(home), *CODE))


def _paths(values: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for index, (key, value) in enumerate(inner):
        if isinstance(values, list) and index > 1:
            return  # lists hold more of the same
        yield (*before, key)
        yield from _paths(value, (*before, key))


def _with(values: Any, path: tuple[Any, ...], value: Any, *, drop: bool = False) -> Any:
    made = copy.deepcopy(values)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if drop:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


def _dump(values: Any) -> bytes:
    return json.dumps(values).encode()
