"""Values in errors are short, and suggestions near."""

from __future__ import annotations

from typing import Any

import pytest

from trainshort.common.messages import did_you_mean, nearest, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb", r"'a\nb'"),
        (3.5, "3.5"),
        (10**400, "a number of more than 80 digits"),
        (list(range(100)), "a list of 100 entries"),
        (dict.fromkeys(range(2000)), "an object of 2,000 entries"),
    ],
)
def test_values_are_quoted_in_one_line(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize("value", ["x" * 10_000, ["x" * 10_000], {"x" * 10_000: 1}], ids=type)
def test_long_values_are_cut(value: Any) -> None:
    assert len(shown(value)) < 90


def test_the_nearest_name() -> None:
    known = ["length", "lengths", "seed"]
    assert nearest("lenght", known) == "length"
    assert nearest(7, known) is None


def test_suggestions() -> None:
    known = ("length", "seed")
    assert did_you_mean("lenght", known) == "; did you mean 'length'?"
    assert did_you_mean("--lenght", ["--length"], typed=True) == "; did you mean --length?"
    assert did_you_mean("xyzzy", known) == did_you_mean("xyzzy", known, typed=True) == ""


def test_a_command_line_is_more_forgiving() -> None:
    assert did_you_mean("figure", ["config"]) == ""
    assert did_you_mean("figure", ["config"], typed=True) == "; did you mean config?"
