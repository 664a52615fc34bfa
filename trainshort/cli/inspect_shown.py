"""The tables of `trainshort inspect` on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from trainshort.cli.shown import new_table

Values = Mapping[str, Any]
FIGURES = ("visited", "can see", "reach", "(most)", "99% within", "(most)", "mattered")
CAPTION = (
    "visited: of the keys in sight, the share that attention compares, in blocks\n"
    "can see: the share in certified windows, all others provably can't matter\n"
    "reach: how many tokens away these windows end, mean and most\n"
    "99% within: tokens in which 99% of a query's attention lies, mean and most\n"
    "mattered: of the keys that it can see, the share that can't be left out\n"
)


def heads_table(found: Values) -> Table:
    """One row a head."""
    slopes = found["slopes"]
    columns = ["layer", "head", *(["slope"] if slopes else []), *FIGURES]
    table = new_table(_title(found), columns, CAPTION)
    for layer, row in enumerate(found["heads"]["visited"]):
        for head in range(len(row)):
            slope = [f"{slopes[head]:.4g}"] if slopes else []
            first = str(layer + 1) if head == 0 else ""
            table.add_row(first, str(head + 1), *slope, *_cells(found, layer, [head]), end_section=False)
    return table


def layers_table(found: Values) -> Table:
    """One row a layer: means over its heads, and the farthest of them."""
    table = new_table(
        _title(found), ["layer", *FIGURES, "farthest head"], CAPTION + "means over heads; --heads lists every head"
    )
    for layer, row in enumerate(found["heads"]["visited"]):
        needed = found["heads"]["needed"][layer]
        table.add_row(
            str(layer + 1),
            *_cells(found, layer, range(len(row))),
            str(1 + max(range(len(row)), key=needed.__getitem__)),
        )
    return table


def lengths_table(found: Values) -> Table:
    """Visited keys by length, over all layers and heads."""
    table = new_table("by length", ["length", *(f"{each['length']:,}" for each in found["by_length"])])
    for title, name in (("visited", "visited"), ("can see", "seen")):
        shares = [[value for row in each[name] for value in row] for each in found["by_length"]]
        table.add_row(title, *(f"{statistics.fmean(each):.1%}" for each in shares))
    return table


def _title(found: Values) -> str:
    return f"{found['about']['folder']}: {found['length']:,} tokens of {found['text']['name']}, in {found['dtype']}"


def _cells(found: Values, layer: int, heads: Sequence[int]) -> list[str]:
    def values(name: str) -> list[float]:
        return [found["heads"][name][layer][head] for head in heads]

    return [
        f"{statistics.fmean(values('visited')):.1%}",
        f"{statistics.fmean(values('seen')):.1%}",
        f"{statistics.fmean(values('reach')):,.0f}",
        f"{max(values('farthest')):,.0f}",
        f"{statistics.fmean(values('needed')):,.0f}",
        f"{max(values('most_needed')):,.0f}",
        f"{statistics.fmean(values('mattered')):.1%}",
    ]
