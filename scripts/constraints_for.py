"""constraints.txt for another torch than the pinned one: `lowest` that is supported, `highest` there is, or a number.

    python scripts/constraints_for.py lowest > constraints-lowest.txt

Every torch asks for a setuptools and a triton of its own: with another one the pins of these go too.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOWEST, HIGHEST = "lowest", "highest"
CHOSEN_BY_TORCH = ("setuptools", "torch", "triton")
OLD_NUMPY = "numpy<2.4"  # Triton's interpreter, which tests use, converts arrays in a way that numpy 2.4 refuses


def torch_pin(which: str) -> str:
    """What pip is told of torch; nothing where it is to take the newest."""
    if which == HIGHEST:
        return ""
    if which == LOWEST:
        return f"torch=={lowest()}.*"
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?(\+\w+)?", which):
        sys.exit(f"torch must be {LOWEST}, {HIGHEST} or a version such as {lowest()}.0, got {which!r}")
    return f"torch=={which}"


def lowest() -> str:
    """As pyproject.toml promises it."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (found,) = (each.removeprefix("torch>=") for each in wanted if each.startswith("torch>="))
    return found


def constraints(which: str) -> str:
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    lines = [line for line in pinned if line.partition("==")[0] not in CHOSEN_BY_TORCH]
    if which == LOWEST:
        lines = [OLD_NUMPY if line.startswith("numpy==") else line for line in lines]
    return "\n".join(filter(None, [*lines, torch_pin(which)])) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} lowest|highest|VERSION")
    print(constraints(sys.argv[1]), end="")
