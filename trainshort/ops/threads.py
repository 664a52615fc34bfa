"""Which threads compute: several for the splits of one call, or one where there is little to do.

Torch splits every kernel over OpenMP threads, which wait for one another at its end, and wait by spinning. Where
another process holds the core of the thread that is waited for, that takes until the scheduler's next turn:
milliseconds, at each of hundreds of kernels. So a call is split once, into a few large splits, which torch's own
OpenMP threads take one after the other (`run`): the kernels inside are not split again, and there is one wait at the
end. What is over in microseconds is not split at all (`one_thread`).

Torch has no function for either, and `torch.set_num_threads` changes more than the calling thread. So this asks the
OpenMP library that torch runs on, and MKL, which keeps a number of its own.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_inside = threading.local()


class _Library:
    """Functions of the OpenMP library that torch runs on, and of MKL where torch has it."""

    def __init__(self, handle: Any) -> None:
        self.parallel = handle.GOMP_parallel  # (function, its argument, threads, flags): run by that many threads
        self.set_threads = handle.omp_set_num_threads  # of the kernels of the calling thread
        self.set_mkl_threads = None  # the same; returns the number before, 0 for none of this thread's own
        if torch.backends.mkl.is_available():
            self.set_mkl_threads = handle.MKL_Set_Num_Threads_Local

    def is_torchs(self) -> bool:
        before = torch.get_num_threads()
        self.set_threads(before + 1)
        seen = torch.get_num_threads()
        self.set_threads(before)
        return seen == before + 1


@cache
def _library() -> _Library | None:
    """None where torch's library is not found or not of this kind, as on Windows and macOS."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.openmp.is_available() or not path.exists():
        return None
    try:
        library = _Library(ctypes.CDLL(str(path)))  # also finds what torch is linked to
    except (AttributeError, OSError):
        return None
    return library if library.is_torchs() else None


def available() -> int:
    """How many threads would share a call made here."""
    return 1 if is_inside() or _library() is None else torch.get_num_threads()


def is_inside() -> bool:
    """Whether this is one of the threads of `run`, whose kernels are not split."""
    return getattr(_inside, "run", False)


def run(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """function(item) for every item, by several threads, without gradients. The first items are taken first."""
    library, count = _library(), min(available(), len(items))
    if library is None or count < 2:
        return [function(item) for item in items]
    inference = torch.is_inference_mode_enabled()  # a mode of this thread, like no_grad
    todo, results = deque(enumerate(items)), dict[int, Result]()
    errors: list[BaseException] = []

    def take() -> tuple[int, Item] | None:
        try:
            return todo.popleft()
        except IndexError:
            return None

    def work(_: object) -> None:
        try:
            _inside.run = True
            with torch.inference_mode(inference), torch.no_grad():
                for index, item in iter(take, None):
                    results[index] = function(item)
        except BaseException as error:  # cannot pass through OpenMP
            errors.append(error)
            todo.clear()
        finally:
            _inside.run = False

    try:
        with _late_errors(work, errors):
            library.parallel(_Region(work), None, count, 0)
    finally:
        _inside.run = False
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(items))]


@contextmanager
def _late_errors(work: Callable[..., None], errors: list[BaseException]) -> Iterator[None]:
    """Keeps what signal handlers raise while `work` is being entered or left: ctypes would print it and go on.

    Python runs signal handlers in its main thread alone, so the others need nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.object is work and unraisable.exc_value is not None:
            errors.append(unraisable.exc_value)
        else:
            usual(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


@contextmanager
def one_thread() -> Iterator[None]:
    """The kernels that this thread runs inside are not split. Nothing changes for other threads."""
    library, before = _library(), torch.get_num_threads()
    if library is None or before == 1:
        yield
        return
    library.set_threads(1)
    mkl_before = library.set_mkl_threads(1) if library.set_mkl_threads else 0
    try:
        yield
    finally:
        library.set_threads(before)
        if library.set_mkl_threads:
            library.set_mkl_threads(mkl_before)
