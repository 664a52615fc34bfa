"""What ALiBi's heads see: slopes, and the windows that were certified, by layer and head."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from trainshort.report.methods import Method
from trainshort.report.reading import Run
from trainshort.report.records import mapping, number, whole
from trainshort.report.series import Protocols, records_at

Grid = list[list[float]]  # [layers][heads]


@dataclass(frozen=True)
class Seen:
    """At one test length, means over seeds; of `farthest` the largest."""

    method: Method
    length: int
    kept: Grid
    reach: Grid | None
    farthest: Grid | None
    seeds: int

    @property
    def skipped(self) -> Grid:
        return [[round(1.0 - value, 5) for value in row] for row in self.kept]


def slopes_of(run: Run) -> list[float] | None:
    """One a head, as the config has them; None where it has none or they were learned."""
    if run.position != "alibi":
        return None
    options = mapping(run.model.get("position_options")) or mapping(run.train.get("position_options"))
    heads = whole(run.model.get("num_heads"))
    scale = number(options.get("scale", 1.0))
    if options.get("trainable") or heads is None or not 1 <= heads <= 4096 or scale is None:
        return None
    given = options.get("slopes")
    if given is not None:
        values = [number(each) for each in given] if isinstance(given, list) else []
        known = [value * scale for value in values if value is not None and value > 0]
        return known if len(known) == heads else None
    return [slope * scale for slope in paper_slopes(heads)]


def paper_slopes(heads: int) -> list[float]:
    """2^(-8h/H) for a power of two; otherwise those of the one below, then every second of twice that."""
    closest = 1 << (heads.bit_length() - 1)
    steps = [head + 1 if head < closest else head - closest + 0.5 for head in range(heads)]
    return [2.0 ** (-8.0 * step / closest) for step in steps]


def seen_by(method: Method, protocols: Protocols, protocol: str) -> list[Seen]:
    """For each length at which certified windows were recorded."""
    found = []
    for length, records in records_at(method, protocols, protocol).items():
        grids = [(grid(each.get("kept")), grid(each.get("reach")), grid(each.get("farthest"))) for each in records]
        kept = [each[0] for each in grids if each[0] is not None]
        shape = _shape(kept[0]) if kept else None
        kept = [each for each in kept if _shape(each) == shape]
        reach = [each[1] for each in grids if each[1] is not None and _shape(each[1]) == shape]
        farthest = [each[2] for each in grids if each[2] is not None and _shape(each[2]) == shape]
        if kept:
            found.append(
                Seen(
                    method,
                    length,
                    _together(kept, statistics.fmean),
                    _together(reach, statistics.fmean) if reach else None,
                    _together(farthest, max) if farthest else None,
                    len(kept),
                )
            )
    return found


def grid(value: object) -> Grid | None:
    """A table of numbers with rows of one length, or None."""
    if not isinstance(value, list) or not value or not all(isinstance(row, list) and row for row in value):
        return None
    rows = [[number(each) for each in row] for row in value]
    if len({len(row) for row in rows}) > 1 or any(each is None for row in rows for each in row):
        return None
    return [[each for each in row if each is not None] for row in rows]


def few_heads(slopes: list[float], limit: int = 4) -> list[int]:
    """Heads from the steepest to the flattest slope, evenly by rank."""
    ranked = sorted(range(len(slopes)), key=lambda head: -slopes[head])
    count = min(limit, len(ranked))
    if count == 1:
        return ranked
    return [ranked[round(place * (len(ranked) - 1) / (count - 1))] for place in range(count)]


def distances(length: int, places: int = 60) -> list[int]:
    """From 1 to the length, evenly on a logarithmic axis."""
    if length < 2:
        return [1]
    return sorted({round(length ** (place / (places - 1))) for place in range(places)})


def widest(seen: Seen, head: int) -> tuple[float | None, float | None]:
    """Of one head over all layers: the mean of its mean reach, and the farthest key it ever visited."""
    reach = None if seen.reach is None else statistics.fmean(row[head] for row in seen.reach)
    farthest = None if seen.farthest is None else max(row[head] for row in seen.farthest)
    return reach, farthest


def _shape(values: Grid) -> tuple[int, int]:
    return len(values), len(values[0])


def _together(grids: list[Grid], combine: Callable[[list[float]], float]) -> Grid:
    layers, heads = _shape(grids[0])
    return [[float(combine([each[row][head] for each in grids])) for head in range(heads)] for row in range(layers)]
