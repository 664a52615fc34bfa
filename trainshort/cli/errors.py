"""Errors as users see them: one sentence that says what came, what is allowed and what to do."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable

from trainshort.common.extras import MissingExtraError, pip_command

INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended
NO_MEMORY = re.compile(  # as torch, CUDA's libraries and Triton say it, whatever the error is wrapped in
    r"CUDA out of memory|CUDA error: out of memory|\[CUDA\]: out of memory|STATUS_(\w+_)?ALLOC(ATION)?_FAILED"
    r"|can't allocate memory"
)
PLAIN = (ValueError, TypeError, RuntimeError, KeyError, FileNotFoundError, FileExistsError)


class UsageError(Exception):
    """What was typed cannot be understood: exit status 2."""


def name_flags(text: str, fields: Iterable[str]) -> str:
    """An error of the library as one of the command line: it names flags where the library names fields.

    Both, as in `out (--out)`, become the flag. A name with an underscore is a field wherever it stands; one that is
    a word too is one where it begins what is said, or is a factor. What is said of one position is of --positions.
    """
    fields = list(fields)
    text = re.sub(r"\b[\w.]+ \((--[a-z][\w-]*(?: [A-Z][\w.]*)?)\)", r"\1", text)
    for name in fields:
        flag = "--" + name.replace("_", "-")
        if "_" in name:
            text = re.sub(rf"(?<![\w./'\"-]){name}(?![\w./'\"])", flag, text)
            continue
        said = r"must|may|is for|names|needs|goes with|was"
        one = name if name.removesuffix("s") in fields else name.removesuffix("s") + "s?"
        text = re.sub(rf"(^|\(|[;:] ){one}(?= (?:{said})\b)", rf"\g<1>{flag}", text)
        text = re.sub(rf"(?<![\w-]){name}(?= x )|(?<= x ){name}\b", flag, text)
    return text


def sentence(error: BaseException) -> str:
    """What happened, in one line without a traceback."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or NO_MEMORY.search(str(error)):
        return "not enough memory: use shorter lengths, a smaller batch or a smaller model"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("trainshort"):
        package = error.name.partition(".")[0]
        return f"this needs the package {package}: {pip_command(package)}"
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        return _of_the_system(error)
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    text = " ".join(text.split())
    if isinstance(error, RuntimeError) and re.search("same dtype|mixed dtype|scalar type", text):  # torch's words
        return f"{text}: if the weights are of several dtypes, --dtype gives them one"
    if isinstance(error, KeyError) and " " not in text:  # a name alone says nothing
        return f"there is no {text!r} where it was looked for: a file may be damaged (--debug shows where)"
    if isinstance(error, MissingExtraError):
        return text
    if isinstance(error, PLAIN) and type(error).__module__ == "builtins" and text:
        return text
    name = type(error).__name__
    return f"{name}: {text} (--debug shows where)" if text else f"{name} (--debug shows where)"


def _of_the_system(error: OSError) -> str:
    what = str(error.strerror)
    what = what[:1].lower() + what[1:]
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{where}no space left on the disk: free some and run the same command again"
    if error.errno == errno.EACCES:
        return f"{where}permission denied: choose another place with --out, or change who may write there"
    return f"{where}{what}"
