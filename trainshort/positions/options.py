"""The options of position methods as JSON would give them back: flags, numbers, texts and lists of numbers.

A config is compared, saved and read again, so it may hold nothing that JSON does not know. What each option may be
is read from the signature of its method: the annotations are the one place that says it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainshort.common.checks import LARGEST_SIZE, is_finite, is_number, is_size


def _are_numbers(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(is_number(each) for each in value))


# Annotation -> what the error says is allowed, and whether a plain value is that.
KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": (f"an int from 1 to {LARGEST_SIZE}", is_size),
    "float": ("a finite number", is_finite),
    "str": ("a text", lambda value: isinstance(value, str)),
    "int | None": (f"an int from 1 to {LARGEST_SIZE}, or None", lambda value: value is None or is_size(value)),
    "float | None": ("a finite number, or None", lambda value: value is None or is_finite(value)),
    "Sequence[float] | None": ("a list of numbers, or None", _are_numbers),
}


def check_options(name: str, method: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as plain values. Refuses those that the method of that name does not take or cannot use."""
    if not isinstance(options, Mapping):
        raise ValueError(f"position_options must be a dict of options such as {{'base': 1e4}}, got {options!r}")
    known = dict(list(inspect.signature(method).parameters.items())[1:])  # the first is the shape
    checked = {}
    for option, value in options.items():
        if option not in known:
            allowed = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"position {name!r} has no option {option!r}: {allowed}")
        allowed, fits = _kind(name, known[option])
        plain = _plain(value)
        if not fits(plain):
            raise ValueError(f"position {name!r}: option {option!r} must be {allowed}; got {value!r}")
        checked[option] = plain
    return checked


def _kind(name: str, parameter: inspect.Parameter) -> tuple[str, Callable[[object], bool]]:
    """What a parameter may be, however its annotation was written."""
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.removeprefix("collections.abc.").removeprefix("typing.")
    if text not in KINDS:
        raise ValueError(
            f"position {name!r}: the type of its option {parameter.name!r} must be one of {', '.join(KINDS)}, which "
            f"a config can hold; the class has {'none' if annotation is inspect.Parameter.empty else text}"
        )
    return KINDS[text]


def _plain(value: Any) -> Any:
    """Tensors, arrays and their scalars as Python numbers, every kind of sequence as a new list."""
    if isinstance(value, Tensor) and value.is_meta:
        return value  # it has no numbers to give, and is refused as what it is
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple, range)):
        return [_plain(each) for each in value]
    return value
