"""Text from runs made safe for where it goes: HTML, JSON inside a page, LaTeX and matplotlib's mathematics."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import Any

LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
}


def clean(text: str) -> str:
    """Without what UTF-8 or XML cannot hold: lone surrogates and control characters become U+FFFD."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if (ord(each) < 32 and each not in "\n\t") or 0xD800 <= ord(each) < 0xE000
        or ord(each) in (0x7F, 0xFFFE, 0xFFFF) else each
        for each in text
    )  # fmt: skip


def escaped(value: Any) -> str:
    """As text of HTML, in elements and in quoted attributes."""
    return html.escape(clean(str(value)), quote=True)


def finite(value: Any) -> Any:
    """The same value with None in place of what JSON does not know."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {clean(str(key)): finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return clean(value) if isinstance(value, str) else value


def json_for_page(value: Any) -> str:
    """JSON that cannot end the script element it stands in, nor begin a comment there."""
    text = json.dumps(finite(value), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def latex(text: str) -> str:
    return "".join(LATEX.get(each, each) for each in clean(text)).replace("\n", " ")


def for_matplotlib(text: str) -> str:
    """A label in which a dollar is a dollar, and that is not hidden because it begins with an underscore."""
    text = f" {text}" if text.startswith("_") else text
    return clean(text).replace("\n", " ").replace("\t", " ").replace("\\", "\\\\").replace("$", r"\$")


def for_spreadsheet(text: str) -> str:
    """A cell of a CSV file that no spreadsheet takes for a formula."""
    text = clean(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text


def significant(value: float | None, like: float | None = None) -> str:
    """For people: four figures, three of what is small; or with as many decimals as `like` has."""
    if value is None:
        return "–"
    size = abs(value if like is None else like)
    if size >= 1e6:
        return f"{value:.2e}"
    if size < 0.1:
        return f"{value:.3g}"
    decimals = 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0
    return f"{value:,.{decimals}f}"


def times(ratio: float) -> str:
    """A ratio in three figures: ×0.978, ×1.95, ×24.3, ×2,430."""
    size = abs(ratio)
    if 0 < size < 0.01:
        return f"×{ratio:.2g}"
    decimals = 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0
    return f"×{ratio:,.{decimals}f}" if size < 1e6 else f"×{ratio:.1e}"


def listed(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
