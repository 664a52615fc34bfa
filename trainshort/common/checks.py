"""Whether a value is what it has to be. Booleans count as ints in Python; here they never count as numbers."""

from __future__ import annotations

import math
from typing import TypeGuard

LARGEST_EXACT = 2**53  # of counts and places in JSON: beyond it JSON's numbers are not exact
LARGEST_SIZE = 2**31 - 1  # a size beyond it is a slip of the keyboard, and torch would not say so


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an int, but no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_whole(value: object, low: int = 0, high: int = LARGEST_EXACT) -> bool:
    """Whether a value is a whole number from low to high."""
    return is_int(value) and low <= value <= high


def is_size(value: object) -> bool:
    """Whether a value is a positive int that can be the size of something."""
    return is_whole(value, 1, LARGEST_SIZE)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is an int or a float, but no bool; and no int so large that a float cannot hold it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number, and neither infinite nor NaN."""
    return is_number(value) and math.isfinite(value)


def is_plain_name(value: object) -> bool:
    """Whether a value names a file inside its folder: no path, nothing hidden, nothing unprintable."""
    if not isinstance(value, str) or not value or len(value) > 255 or value.startswith("."):
        return False
    return value.isprintable() and not any(each in value for each in "/\\:")


def is_digest(value: object) -> bool:
    """Whether a value is a sha256 in hexadecimal digits."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
