"""The arguments of the operators that backends register with torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.ops.dense import LEAVES, Case
from tests.ops.triton.interpreter import problem_of
from trainshort.ops import operators


def operator_arguments(case: Case, requires_grad: bool) -> tuple[Any, ...]:
    there = {name: getattr(case, name) for name in LEAVES if getattr(case, name) is not None}
    case = replace(case, **{name: t.detach().requires_grad_(requires_grad) for name, t in there.items()})
    return operators.pack(problem_of(case))
