"""Where the contract is tested: a backend on a device, with the number formats and sizes that suit it.

    reference     dense, on a CPU
    blocked       on a CPU
    auto          on a CPU, for tests that name it
    interpreted   the Triton kernels in Triton's interpreter: alone in a process with TRITON_INTERPRET=1
    triton_gpu    the Triton kernels on a GPU
    blocked_gpu   on a GPU

A test of this folder takes a `place` and runs at each of them but `auto`, or at those that `@at` names. One that
takes a `dtype` besides runs in the place's formats, or in those of them that `@formats` names ("low" is the place's
own 16-bit format); one that takes a `mode` runs in the place's modes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.budget import Judge
from tests.ops.cases import on, random_case
from tests.ops.dense import Case
from tests.ops.triton.rounding import KernelJudge
from trainshort.ops import INTERPRETED

at = pytest.mark.places
formats = pytest.mark.formats
slow_in_interpreter = pytest.mark.slow_in_interpreter
WITH_WINDOWS = ("blocked", "interpreted", "triton_gpu", "blocked_gpu")
NOT_INTERPRETED = ("reference", "blocked", "triton_gpu", "blocked_gpu")
ON_CPU = ("reference", "blocked", "interpreted")

MODES: dict[str, dict[str, Any]] = {
    "everything_float32": {"tolerance": 0.0},
    "windows_float32": {},
    "everything_float16": {"tolerance": 0.0, "dtype": torch.float16},
    "windows_bfloat16": {"dtype": torch.bfloat16},
}
SLOPES = (0.9, 0.4, 0.05, 0.15)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Place:
    name: str
    backend: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    modes: tuple[str, ...]
    low: torch.dtype = torch.bfloat16  # the 16-bit format that it is used with
    batch: int = 2
    heads: int = 3
    length: int = 300
    cache: int = 1000  # keys of a decoding step
    dim: int = 8
    combinations: int = 20  # in each test of random ones

    def __str__(self) -> str:
        return self.name

    @property
    def interpreted(self) -> bool:
        return self.name == "interpreted"

    @property
    def skips(self) -> bool:
        """Whether keys that can't matter are left out."""
        return self.backend != "reference"

    @property
    def quick(self) -> torch.dtype:
        """For tests that any format will do for: kernels for a GPU compile thrice as fast in 16 bits."""
        return self.low if self.name == "triton_gpu" else torch.float32

    @property
    def steep(self) -> Tensor:
        """A slope for each head, so that keys can be skipped in some."""
        return torch.tensor(SLOPES[: self.heads])

    @property
    def steep_by_row(self) -> Tensor:
        return torch.stack((self.steep, self.steep.flip(0) / 3))

    @property
    def bucket(self) -> dict[str, Any]:
        return {"bias": "bucket"} | ({"num_buckets": 8, "max_distance": 40} if self.interpreted else {})

    def case(self, **features: Any) -> Case:
        """Random numbers of this place's sizes, unless others are asked for."""
        sizes = {"batch": self.batch, "heads": self.heads, "queries": self.length, "dim": self.dim}
        return on(self.device, random_case(**sizes | features))

    def few_heads(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of tests.ops.hostile: in the interpreter one row, its steepest and its gentlest head."""
        if not self.interpreted:
            return arguments
        slopes = arguments["slopes"]
        few = {name: arguments[name][-1:, ::3] for name in ("q", "k", "v")}
        return arguments | few | {"slopes": slopes[-1:, ::3] if slopes.dim() == 2 else slopes[::3]}

    def here(self, case: Case) -> Case:
        return on(self.device, case)

    def judge(self, case: Case) -> Judge:
        """The kernels multiply in the inputs' own dtype, and are allowed what that costs."""
        return KernelJudge(case) if self.backend == "triton" else Judge(case)

    def judge_of(self, make: Callable[..., Case], *arguments: Hashable) -> Judge:
        """The judge of make(place, *arguments). Kept for the next test: both CPU backends are judged alike."""
        return _judge_of(PLACES["blocked"] if self.name == "reference" else self, make, *arguments)

    def check(self, case: Case) -> None:
        """Output and every gradient agree with float64 dense attention."""
        self.judge(case).check(case.run(self.backend))


@lru_cache(maxsize=2)
def _judge_of(place: Place, make: Callable[..., Case], *arguments: Hashable) -> Judge:
    return place.judge(make(place, *arguments))


def _on_cpu(backend: str) -> Place:
    modes = ("everything_float32", "windows_float32")
    return Place(name=backend, backend=backend, device="cpu", dtypes=FLOATS, modes=modes)


PLACES = {
    place.name: place
    for place in (
        _on_cpu("reference"),
        _on_cpu("blocked"),
        _on_cpu("auto"),
        Place(
            name="interpreted", backend="triton", device="cpu", dtypes=(torch.float32, torch.float16),
            modes=("windows_float32", "everything_float16"), low=torch.float16,
            batch=1, heads=2, length=150, cache=400, dim=16, combinations=3,
        ),
        Place(
            name="triton_gpu", backend="triton", device="cuda", dtypes=(torch.float32, torch.float16, torch.bfloat16),
            modes=("windows_bfloat16",), heads=4, length=700, cache=3000, dim=64, combinations=1,
        ),
        Place(
            name="blocked_gpu", backend="blocked", device="cuda",
            dtypes=(torch.float32, torch.bfloat16, torch.float64), modes=("windows_float32",), combinations=4,
        ),
    )
}  # fmt: skip


def places_of(names: tuple[str, ...]) -> list[Place]:
    """Those of these names (all but `auto` if there are none) that this process can be asked for."""
    asked = names or tuple(name for name in PLACES if name != "auto")
    return [PLACES[name] for name in asked if (name == "interpreted") == INTERPRETED]


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give a test its places, last of its arguments, and what it wants of each of them."""
    definition = metafunc.definition
    names = definition.get_closest_marker("places")
    wanted = definition.get_closest_marker("formats")
    slow = definition.get_closest_marker("slow_in_interpreter") is not None
    marks = {"triton_gpu": [pytest.mark.gpu], "blocked_gpu": [pytest.mark.gpu]}
    marks["interpreted"] = [pytest.mark.slow] if slow else []

    def choices(place: Place) -> Iterator[tuple[Any, ...]]:
        if "mode" in metafunc.fixturenames:
            yield from ((mode, place) for mode in place.modes)
        elif "dtype" in metafunc.fixturenames:
            asked = place.dtypes if wanted is None else [place.low if one == "low" else one for one in wanted.args]
            yield from ((dtype, place) for dtype in place.dtypes if dtype in asked)
        else:
            yield (place,)

    first = next((name for name in ("mode", "dtype") if name in metafunc.fixturenames), None)
    metafunc.parametrize(
        (first, "place") if first else ("place",),
        [
            pytest.param(*values, marks=marks.get(place.name, []))
            for place in places_of(names.args if names else ())
            for values in choices(place)
        ],
        ids=str,
    )
