"""What counts as a number, a size, a name and a digest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainshort.common.checks import (
    LARGEST_EXACT,
    LARGEST_SIZE,
    is_digest,
    is_finite,
    is_int,
    is_number,
    is_plain_name,
    is_size,
    is_whole,
)


@pytest.mark.parametrize("value", [True, False, None, "1", [1], 1j])
def test_what_is_no_number_at_all(value: Any) -> None:
    for check in (is_int, is_whole, is_size, is_number, is_finite):
        assert not check(value)


def test_limits_of_whole_numbers() -> None:
    assert [is_whole(value) for value in (-1, 0, LARGEST_EXACT, LARGEST_EXACT + 1)] == [False, True, True, False]
    assert [is_whole(value, -5, 5) for value in (-6, -5, 5, 6)] == [False, True, True, False]
    assert [is_size(value) for value in (0, 1, LARGEST_SIZE, LARGEST_SIZE + 1)] == [False, True, True, False]
    assert is_int(-(10**400))
    assert not is_whole(1.0)


def test_numbers_that_are_finite() -> None:
    assert [is_number(value) for value in (1, 0.5, math.inf, math.nan, 10**400)] == [True, True, True, True, False]
    assert [is_finite(value) for value in (1, 0.5, math.inf, math.nan, 10**400)] == [True, True, False, False, False]


@pytest.mark.parametrize(
    "name", ["", ".hidden", "a/b", "a\\b", "c:d", "..", "a\nb", "a\0b", "x" * 256, None, 3], ids=repr
)
def test_names_that_lead_out_of_a_folder(name: Any) -> None:
    assert not is_plain_name(name)


def test_names_of_files() -> None:
    assert is_plain_name("model-00000012.safetensors")


def test_digests() -> None:
    assert is_digest("0123456789abcdef" * 4)
    for wrong in ("0123456789abcdef" * 3, "0123456789ABCDEF" * 4, 7, None):
        assert not is_digest(wrong)
