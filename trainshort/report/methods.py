"""Runs that differ in nothing but their seed are one method, with one name, colour and marker on the whole page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainshort.report.reading import Run
from trainshort.report.text import clean

NAMES = {
    "alibi": "ALiBi",
    "sinusoidal": "Sinusoidal",
    "learned": "Learned",
    "rotary": "Rotary",
    "t5": "T5 bias",
    "fox": "FoX",
    "kerple": "KERPLE",
    "none": "No positions",
}
# Of a training config, what does not make it another method: where it ran, what it wrote, and the seed.
INCIDENTAL = {
    "data", "out", "name", "seed", "device", "compile", "log_every", "eval_every", "eval_tokens",
    "checkpoint_every", "tensorboard",
}  # fmt: skip
# Distinct with the common colour blindnesses, and on light and dark ground; methods also differ by marker.
COLORS = ("#d1495b", "#2f7fd1", "#1f9e76", "#c98a00", "#8f63d2", "#4aa3b5", "#b8612e", "#7a8793")
PREFERRED = {"alibi": 0, "rotary": 1, "t5": 2, "sinusoidal": 3, "learned": 4, "none": 5, "fox": 6, "kerple": 7}
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Method:
    label: str
    position: str
    length: int | None
    runs: tuple[Run, ...]
    color: str
    marker: str
    dash: str
    strong: bool = False  # ALiBi where it is compared with others: what the page is about

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs if run.seed is not None]


def methods_of(runs: list[Run], names: Mapping[str, str] | None = None) -> list[Method]:
    """In the order in which position methods come, shorter training lengths first.

    names: what to call position methods that are not ours.
    """
    together: dict[str, list[Run]] = {}
    known = {run.data for run in runs if run.data is not None}
    for run in runs:  # where only one text is known, runs that cannot say theirs were trained on it
        data = next(iter(known)) if len(known) == 1 else run.data
        together.setdefault(_key(run, data), []).append(run)
    kinds = list(dict.fromkeys(run.kind for run in runs))
    groups = sorted(together.values(), key=lambda group: (kinds.index(group[0].kind), group[0].length or 0))
    labels = _labels(groups, {**(names or {}), **NAMES})
    lengths = sorted({group[0].length or 0 for group in groups})
    colors = _colors(kinds)
    compared = set(kinds) > {"alibi"}
    used: dict[tuple[str, int | None], int] = {}
    methods = []
    for group, label in zip(groups, labels, strict=True):
        first = group[0]
        color = colors[first.kind]
        again = used.setdefault((first.kind, first.length), 0)
        used[first.kind, first.length] += 1
        methods.append(
            Method(
                label,
                first.position,
                first.length,
                tuple(group),
                COLORS[color % len(COLORS)],
                MARKERS[(color + 3 * again) % len(MARKERS)],
                DASHES[(lengths.index(first.length or 0) + again) % len(DASHES)],
                compared and first.kind == "alibi",
            )
        )
    return methods


def _key(run: Run, data: str | None) -> str:
    if not run.train:
        return f"alone {run.folder}"
    return json.dumps([_telling(run), data], sort_keys=True, default=str)


def _telling(run: Run) -> dict[str, Any]:
    usual = {"extended_at": None, "attention": "auto"}  # older runs have no such words
    same = {key for key, value in usual.items() if (run.train.get(key) or value) == value}
    return {key: value for key, value in run.train.items() if key not in INCIDENTAL | same}


def _colors(kinds: list[str]) -> dict[str, int]:
    """Known methods have the same colour in every report; others take what is free."""
    chosen = {name: PREFERRED[name] for name in kinds if name in PREFERRED}
    free = [place for place in range(len(COLORS)) if place not in chosen.values()] or [len(COLORS) - 1]
    others = [name for name in kinds if name not in PREFERRED]
    return chosen | {name: free[place % len(free)] for place, name in enumerate(others)}


def _labels(groups: list[list[Run]], names: Mapping[str, str]) -> list[str]:
    """The position method, then the training length and whatever else differs, where it does."""
    several = len({group[0].length for group in groups}) > 1
    labels = []
    for group in groups:
        run = group[0]
        label = names.get(run.kind, run.kind) if run.kind == run.position else run.kind
        if several and run.length is not None:
            label += f", L = {run.length:,}"
        labels.append(label)
    for label in set(labels):
        same = [place for place, each in enumerate(labels) if each == label]
        if len(same) > 1:
            for place, difference in zip(same, _differences([groups[place] for place in same]), strict=True):
                labels[place] = f"{label} ({difference})"
    seen: dict[str, int] = {}
    for place, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:
            labels[place] = f"{label} #{seen[label]}"
    return [clean(label) for label in labels]


def _differences(groups: list[list[Run]]) -> list[str]:
    configs = [_telling(group[0]) for group in groups]
    names = list(dict.fromkeys(name for config in configs for name in config))
    differing = [name for name in names if len({json.dumps(each.get(name), default=str) for each in configs}) > 1]
    if not differing or len(differing) > 3 or any(not group[0].train for group in groups):
        return [group[0].name for group in groups]
    return [", ".join(f"{name} {_short(config.get(name))}" for name in differing) for config in configs]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 30 else text[:29] + "…"
