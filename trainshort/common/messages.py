"""Parts of error messages: a value quoted in a few characters, and the name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN = 80  # characters of a value that an error quotes


def shown(value: object) -> str:
    """A value as an error quotes it: in one line, and short however large it is."""
    if isinstance(value, int) and abs(value) > 10**SHOWN:
        return "a number of more than 80 digits"
    if isinstance(value, (dict, list)) and len(value) > SHOWN:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value):,} entries"
    text = " ".join(repr(value[:SHOWN] if isinstance(value, str) else value).split())
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def nearest(word: object, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name that is most like a word; None where none is. likeness: how much, from 0 to 1."""
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1, cutoff=likeness)), None)


def did_you_mean(word: object, known: Iterable[str], *, typed: bool = False) -> str:
    """`; did you mean 'length'?`, or nothing where nothing is near.

    typed: of words of a command line, where more is mistyped, and names are not quoted.
    """
    near = nearest(word, known, likeness=0.5 if typed else 0.6)
    if near is None:
        return ""
    return f"; did you mean {near if typed else repr(near)}?"
