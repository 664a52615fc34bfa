"""From the fields of a dataclass to flags, and from what was typed to the dataclass.

A field becomes `--its-name`, or a positional argument if its metadata says so. Types: str, int, float, bool, Path,
any of them or None, tuples of them (several values), and Literals (choices). Metadata: `help`, `positional`,
`choices`, `metavar`. A class with a classmethod `from_flags` is made by that instead, from the given flags only.
"""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from trainshort.cli.errors import UsageError
from trainshort.common.messages import did_you_mean

WIDTH = 110
NAMES = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}


class Parser(argparse.ArgumentParser):
    """Complains in one sentence, and knows the flag that was meant."""

    def __init__(self, program: str, description: str, examples: str = "") -> None:
        super().__init__(
            prog=program,
            description=description,
            epilog="examples:\n" + examples.strip("\n") if examples else None,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, width=WIDTH, max_help_position=30
            ),
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="help", help="show this and exit")

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+?)(/\S+)?: ", r"\1: ", message)
        raise UsageError(message)

    def refuse_unknown_flags(self, typed: Sequence[str]) -> None:
        """Before argparse looks: it would call the value after an unknown flag the mistake."""
        known = [name for action in self._actions for name in action.option_strings]
        for word in typed:
            if word == "--":
                return
            name = word.split("=", 1)[0]
            if not name.startswith("-") or name == "-" or name in known or _is_number(name) or " " in name:
                continue
            raise UsageError(f"there is no flag {name}{did_you_mean(name, known, typed=True)}")


def add_fields(parser: Parser, cls: Any) -> None:
    """A flag for each field of a dataclass."""
    hints = get_type_hints(cls)
    for field in sorted(fields(cls), key=lambda each: not each.metadata.get("positional", False)):
        if field.metadata.get("hidden"):
            continue
        kind, several, optional = _unwrap(hints[field.name])
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": ""}
        choices = field.metadata.get("choices") or (get_args(kind) if get_origin(kind) is Literal else None)
        if get_origin(kind) is Literal:
            kind = type(get_args(kind)[0])
        options["help"] = _help(field, choices)
        if kind is bool:
            parser.add_argument(_flag(field), dest=field.name, action=argparse.BooleanOptionalAction, **options)
            continue
        options["type"] = _converter(kind, optional, None if choices is None else [str(each) for each in choices])
        options["metavar"] = field.metadata.get("metavar") or _metavar(field, kind, choices)
        if field.metadata.get("positional"):
            needed = field.default is MISSING and field.default_factory is MISSING
            nargs = ("+" if needed else "*") if several else (None if needed else "?")
            parser.add_argument(field.name, nargs=nargs, **options)
        else:
            needed = field.default is MISSING and field.default_factory is MISSING
            parser.add_argument(
                _flag(field), dest=field.name, nargs="+" if several else None, required=needed, **options
            )


def read(parser: Parser, cls: Any, typed: Sequence[str]) -> Any:
    """The dataclass that was typed; refuses what it does not know."""
    parser.refuse_unknown_flags(typed)
    given = vars(parser.parse_args(list(typed)))
    names = {field.name for field in fields(cls)}
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if name in names
    }
    make: Callable[..., Any] = getattr(cls, "from_flags", cls)
    return make(**values)


def _flag(field: Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _unwrap(hint: Any) -> tuple[Any, bool, bool]:
    """The type of one value, whether there are several, and whether it may be None."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        rest = [each for each in get_args(hint) if each is not type(None)]
        optional = len(rest) < len(get_args(hint))
        if Path in rest and str in rest:
            rest = [str]
        if len(rest) != 1:
            raise TypeError(f"a flag has one type, got {hint}")
        hint = rest[0]
    if get_origin(hint) in (tuple, list) or str(get_origin(hint)).endswith("Sequence'>"):
        return get_args(hint)[0], True, optional
    return hint, False, optional


def _converter(kind: Any, optional: bool, choices: list[str] | None) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if optional and text.lower() == "none":
            return None
        if choices is not None and text not in choices:
            raise argparse.ArgumentTypeError(
                f"must be one of {', '.join(choices)}; got {text!r}{did_you_mean(text, choices, typed=True)}"
            )
        try:
            return int(text.replace("_", "")) if kind is int else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"must be {NAMES.get(kind, kind.__name__)}{' or none' if optional else ''}, got {text!r}"
            ) from None

    return convert


def _metavar(field: Field[Any], kind: Any, choices: Sequence[Any] | None) -> str:
    if field.metadata.get("positional"):
        return field.name.upper()
    if choices is not None:
        return _joined(choices) if _fits(choices) else "NAME"
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def _joined(choices: Sequence[Any]) -> str:
    return "{" + ",".join(map(str, choices)) + "}"


def _fits(choices: Sequence[Any]) -> bool:
    return len(_joined(choices)) < 60


def _help(field: Field[Any], choices: Sequence[Any] | None) -> str:
    text = field.metadata.get("help", "")
    if choices is not None and not _fits(choices):
        text += f": {', '.join(map(str, choices))}"
    return (text + _default(field)).replace("%", "%%")


def _default(field: Field[Any]) -> str:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if default is MISSING:
        return "" if field.metadata.get("positional") else " (needed)"
    if default is None or default in ((), ""):
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, (tuple, list)) else str(default)
    if isinstance(default, bool):
        shown = "on" if default else "off"
    return f" (default: {shown})"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
