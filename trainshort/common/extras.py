"""Packages that not every installation has: which extra of trainshort brings each, and what is said without it.

`pip install trainshort` brings torch, numpy and safetensors. Everything else is imported where it is used, like this:

    with needed("tokenizers", by="a BPE"):
        from tokenizers import Tokenizer
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

EXTRAS = {  # of the package that is imported
    "datasets": "datasets",
    "lm_eval": "lm_eval",
    "matplotlib": "lab",
    "plotly": "lab",
    "pyarrow": "parquet",
    "rich": "lab",
    "tensorboard": "tensorboard",
    "tokenizers": "lab",
    "transformers": "hf",
}


class MissingExtraError(ImportError):
    """A package that an extra would have brought is not there."""


@contextmanager
def needed(package: str, *, by: str) -> Iterator[None]:
    """Import a package inside this: where that fails, the error names what needs it and what to install."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(_sentence([package], by, error), name=package) from error


def require(packages: Sequence[str], *, by: str) -> None:
    """Look for packages before any work is done, without importing them."""
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        raise MissingExtraError(_sentence(missing, by), name=missing[0])


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def pip_command(*packages: str) -> str:
    """What installs them: an extra where one does, else the packages themselves."""
    extras = sorted({EXTRAS[package] for package in packages if package in EXTRAS})
    ours = [f"'trainshort[{','.join(extras)}]'"] if extras else []
    return " ".join(["pip install", *ours, *(package for package in packages if package not in EXTRAS)])


def _sentence(packages: Sequence[str], by: str, error: ImportError | None = None) -> str:
    one = len(packages) == 1
    names = packages[0] if one else f"{', '.join(packages[:-1])} and {packages[-1]}"
    what = f"{by} needs the package{'' if one else 's'} {names}"
    if error is not None and is_installed(packages[0]):
        return f"{what}, which cannot be imported ({error}): {pip_command(*packages)}"
    return f"{what}, which {'is' if one else 'are'} not installed: {pip_command(*packages)}"
