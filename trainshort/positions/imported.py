"""Position methods that are not part of trainshort: from a file that the user names, or from an installed package.

A file is run when the user names it, with --import or `import_file`, and for no other reason: a run folder remembers
where its method came from, for people to read, and nothing follows what it says. A package offers methods in the
entry-point group `trainshort.positions`: name = "package.module:Class".
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from trainshort.positions.position import Position
from trainshort.positions.table import BUILT_IN, POSITIONS

GROUP = "trainshort.positions"
LONGEST = 200  # characters of what a folder says that are shown

_files: dict[Path, str] = {}  # resolved: as it was given
_origins: dict[str, dict[str, str]] = {}  # name of a method: where it came from


def import_file(path: str | Path) -> list[str]:
    """Run a Python file that puts position methods into POSITIONS; returns their names. Twice is once."""
    given, path = str(path), Path(path)
    resolved = path.resolve()
    if resolved in _files:
        return [name for name, origin in _origins.items() if origin.get("file") == _files[resolved]]
    if not path.is_file() or path.suffix != ".py":
        raise FileNotFoundError(
            f"{path}: no such Python file: import_file (--import FILE.py) takes one that has a position method"
        )
    before = dict(POSITIONS)
    try:
        _run(resolved)
        names = [name for name, method in POSITIONS.items() if before.get(name) is not method]
        _check(path, names)
    except BaseException:
        POSITIONS.clear()
        POSITIONS.update(before)
        raise
    _files[resolved] = given
    for name in names:
        _origins[name] = {"file": given}
    return names


def imported_files() -> list[str]:
    """The files that were imported, for processes that are to know the same methods."""
    return [str(path) for path in _files]


def installed(name: str) -> type[Position] | None:
    """The method of that name in an installed package, put into the table; None where there is none."""
    found = [point for point in _points() if point.name == name]
    if not found or name in BUILT_IN:
        return None
    if len({point.value for point in found}) > 1:
        listed = " and ".join(sorted(_distribution(point) for point in found))
        raise ValueError(f"position {name!r} is offered by {listed}: uninstall one of them")
    point = found[0]
    try:
        method = point.load()
    except Exception as error:
        raise RuntimeError(
            f"position {name!r} of {_distribution(point)} cannot be loaded from {point.value}: "
            f"{type(error).__name__}: {error}"
        ) from error
    _check_method(f"{_distribution(point)}, {point.value}", name, method)
    POSITIONS[name] = method
    _origins[name] = {"distribution": _distribution(point)}
    return method


def installed_names() -> list[str]:
    return sorted({point.name for point in _points()} - set(BUILT_IN))


def origin_of(name: str) -> dict[str, str] | None:
    """Where a method came from, for a run folder to remember; None for our own."""
    method = POSITIONS.get(name)
    if method is None or method is BUILT_IN.get(name):
        return None
    return _origins.get(name, {"module": method.__module__})


def how_to_import(origin: Any) -> str:
    """What a user has to do to make a method known, as far as a run folder says where it came from."""
    values = origin if isinstance(origin, dict) else {}
    kind = next((kind for kind in ("file", "distribution", "module") if isinstance(values.get(kind), str)), None)
    if kind is None:
        return "import it with import_file (--import FILE.py), or install the package that has it"
    where = repr(str(values[kind])[:LONGEST])
    if kind == "file":
        return (
            f"it came from the file {where}: name it with import_file (--import), which runs it, "
            "if you know what is in it"
        )
    if kind == "distribution":
        return f"it came from the package {where}: install that"
    return f"it came from the Python module {where}: import that first, or name its file with import_file (--import)"


def _points() -> list[EntryPoint]:
    return list(entry_points(group=GROUP))


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.module


def _run(path: Path) -> None:
    name = f"trainshort_imported_{path.stem}_{len(_files)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and torch look for the module of a class
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RuntimeError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error


def _check(path: Path, names: list[str]) -> None:
    if not names:
        raise ValueError(
            f"{path} has no position method: it should end with POSITIONS['name'] = TheClass "
            "(from trainshort.positions import POSITIONS)"
        )
    for name in names:
        if name in BUILT_IN:
            raise ValueError(f"{path} would replace the method {name!r} of trainshort: choose another name for it")
        _check_method(str(path), name, POSITIONS[name])


def _check_method(where: str, name: str, method: Any) -> None:
    if not (isinstance(method, type) and issubclass(method, Position)):
        raise ValueError(
            f"{where}: position {name!r} must be a subclass of trainshort.positions.Position, got {method!r}"
        )
