"""Files that are there whole or not at all: written beside their name, pushed to the disk, then moved into place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainshort.common.reading import file_size

FULL = (errno.ENOSPC, errno.EDQUOT)


def partial_path(path: Path) -> Path:
    """Where this process writes a file before it is moved to `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


@contextlib.contextmanager
def _errors_name(path: Path, partial: Path) -> Iterator[None]:
    """Errors of the system name the path that was asked for, not where it is written before."""
    try:
        yield
    except OSError as error:
        if not str(error.filename).startswith(str(partial)):
            raise
        named = str(path) + str(error.filename)[len(str(partial)) :]
        raise OSError(error.errno, error.strerror, named) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end of the block, or disappears if the block fails."""
    partial = partial_path(path)
    try:
        with _errors_name(path, partial):
            yield partial
            push_to_disk(partial)
            os.replace(partial, path)
            push_to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write files into, which becomes `path` at the end of the block, or disappears if the block fails.

    path: is not there yet, or empty.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path}: is there already; the folder to write must not be there yet, or be empty")
    partial = partial_path(path.absolute())
    try:
        with _errors_name(path, partial):
            partial.mkdir(parents=True)
            yield partial
            for file in partial.iterdir():
                push_to_disk(file)
            os.rename(partial, path)
            push_to_disk(partial.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, values: Any) -> None:
    write_text(path, json.dumps(values, indent=2) + "\n")


def push_to_disk(path: Path) -> None:
    """Until the disk has it: a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    file_size(path, "only files have a sha256")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_partials(folder: Path) -> None:
    """What writers that were killed have left behind."""
    for path in folder.glob(".*.partial"):
        path.unlink(missing_ok=True)


def is_full(error: BaseException) -> bool:
    """Whether the disk was full. Libraries in other languages say it in words only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    return "No space left on device" in str(error) or "os error 28" in str(error)


def free_space(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MB free"
