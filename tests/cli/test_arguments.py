"""Flags from the fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from trainshort.cli.arguments import Parser, add_fields, read
from trainshort.cli.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Everything:
    source: tuple[str, ...] = field(metadata={"positional": True, "help": "files"})
    out: Path = field(default=Path("here"), metadata={"help": "100% of it"})
    count: int | None = field(default=None, metadata={"help": "how many"})
    rate: float = field(default=0.5, metadata={"help": "how fast"})
    fast: bool = field(default=False, metadata={"help": "hurry"})
    kind: Literal["one", "two"] = field(default="one", metadata={"help": "which"})
    sizes: tuple[int, ...] = field(default=(1, 2), metadata={"help": "some"})
    name: str = field(default="a", metadata={"help": "one of", "choices": ("a", "b")})
    secret: int = field(default=3, metadata={"hidden": True})


def parse(*words: str) -> Everything:
    parser = Parser("program", "about", "  program x")
    add_fields(parser, Everything)
    made = read(parser, Everything, words)
    assert isinstance(made, Everything)
    return made


def test_defaults_are_those_of_the_dataclass() -> None:
    assert parse("x") == Everything(source=("x",))


def test_every_kind_of_value() -> None:
    first = parse("x", "y", "--out", "there", "--count", "1_000", "--rate", "1e-3", "--fast")
    assert first == Everything(source=("x", "y"), out=Path("there"), count=1000, rate=0.001, fast=True)
    assert parse("x", "--kind", "two", "--sizes", "4", "5", "6", "--name", "b") == Everything(
        source=("x",), kind="two", sizes=(4, 5, 6), name="b"
    )


def test_none_and_negative_numbers_and_equals_signs() -> None:
    made = parse("x", "--count=none", "--rate", "-2.5", "--no-fast")
    assert (made.count, made.rate, made.fast) == (None, -2.5, False)


def test_a_text_that_looks_like_a_flag() -> None:
    assert parse("--", "--count").source == ("--count",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "--rat", "1"], "there is no flag --rat; did you mean --rate?"),
        (["x", "--count", "many"], "--count: must be a whole number or none, got 'many'"),
        (["x", "--rate", "fast"], "--rate: must be a number, got 'fast'"),
        (["x", "--kind", "tow"], "--kind: must be one of one, two; got 'tow'; did you mean two?"),
        (["x", "--name", "c"], "--name: must be one of a, b; got 'c'"),
        (["x", "--secret", "1"], "there is no flag --secret"),
        (["x", "-z"], "there is no flag -z"),
        ([], "the following arguments are required: SOURCE"),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*words)
    assert str(caught.value).startswith(message)


def test_help_shows_defaults_and_examples() -> None:
    parser = Parser("program", "about", "  program x")
    add_fields(parser, Everything)
    text = parser.format_help()
    for expected in (
        "100% of it (default: here)",
        "some (default: 1 2)",
        "hurry (default: off)",
        "{one,two}",
        "program x",
    ):
        assert expected in text
    assert "secret" not in text
