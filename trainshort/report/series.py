"""The numbers behind the charts, from records and metrics alone: means over seeds, ratios, bins, thinned curves."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainshort.report.methods import Method
from trainshort.report.reading import Run
from trainshort.report.records import Values, mapping, number
from trainshort.report.text import clean

NONOVERLAPPING = "nonoverlapping"
FEW = 500  # tokens: the mean loss of fewer says more of these tokens than of the model
HALF = "sliding, stride L/2"


@dataclass(frozen=True)
class Point:
    """A figure at one test length: the mean over `seeds` runs, and their standard deviation if there are several."""

    length: int
    mean: float | None
    deviation: float | None
    seeds: int
    skipped: str | None = None
    runs: tuple[str, ...] = ()  # the folders of those runs


@dataclass(frozen=True)
class Bin:
    """Places of a window, from 1: the mean loss there in nats, how many tokens it is of, its deviation over seeds."""

    first: int
    last: int
    loss: float
    count: int
    deviation: float | None


@dataclass(frozen=True)
class Curve:
    """Of one training run, thinned: each place is the mean over a stretch of logged steps."""

    run: Run
    steps: list[float]
    seconds: list[float | None]
    losses: list[float]
    validation: list[tuple[int, float]]


class Protocols:
    """How windows were laid, in words that fit all lengths: strides are fixed, or half of each length."""

    def __init__(self, runs: Iterable[Run]) -> None:
        seen = {(each["stride"], each["length"]) for run in runs for each in run.records if each["mode"] == "sliding"}
        counts = Counter(stride for stride, _ in seen)
        self.fixed = {stride for stride, length in seen if counts[stride] > 1 or stride != max(1, length // 2)}
        found = {self.of(each) for run in runs for each in run.records}
        self.names = sorted(found, key=lambda name: (name != NONOVERLAPPING, len(name), name))

    def of(self, record: Values) -> str:
        """What is computed otherwise than usual is another protocol: its speed says nothing of the usual way."""
        attention = record.get("attention")
        return self._windows(record) + (f", {clean(str(attention))} attention" if attention is not None else "")

    def _windows(self, record: Values) -> str:
        if record["mode"] == NONOVERLAPPING or record["stride"] == record["length"]:
            return NONOVERLAPPING
        return f"sliding, stride {record['stride']:,}" if record["stride"] in self.fixed else HALF

    @property
    def main(self) -> str | None:
        return self.names[0] if self.names else None


def records_at(method: Method, protocols: Protocols, protocol: str) -> dict[int, list[Values]]:
    """By length, one for each run that has it."""
    return {length: list(found.values()) for length, found in _by_run(method, protocols, protocol).items()}


def _by_run(method: Method, protocols: Protocols, protocol: str) -> dict[int, dict[str, Values]]:
    """By length, then by the folder of the run."""
    found: dict[int, dict[str, Values]] = {}
    for run in method.runs:
        for record in run.records:
            if protocols.of(record) == protocol:
                found.setdefault(record["length"], {}).setdefault(run.folder, record)
    return dict(sorted(found.items()))


def points(method: Method, protocols: Protocols, protocol: str, name: str, alike: Sequence[str] = ()) -> list[Point]:
    """A figure by test length. Where one seed has none, such as one that diverged, there is no mean either.

    alike: fields of records that must agree between the runs for a mean to mean anything.
    """
    found = []
    for length, by_run in _by_run(method, protocols, protocol).items():
        records = list(by_run.values())
        values = [number(record.get(name)) for record in records]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            reasons = [record["skipped"] for record in records if isinstance(record.get("skipped"), str)]
            missing = f"{len(values) - len(known)} of {len(values)} runs have no figure"
            found.append(Point(length, None, None, len(known), reasons[0] if reasons else missing))
            continue
        if len({tuple(str(record.get(each)) for each in alike) for record in records}) > 1:
            found.append(Point(length, None, None, len(known), f"runs differ in {' or '.join(alike)}: no mean"))
            continue
        deviation = statistics.stdev(known) if len(known) > 1 else None
        found.append(Point(length, statistics.fmean(known), deviation, len(known), runs=tuple(by_run)))
    return found


def ratios(method: Method, values: Sequence[Point]) -> dict[int, float | None]:
    """Each mean over the mean at the training length; None without one there, or if that is of other runs."""
    base = next((each for each in values if each.length == method.length and each.mean), None)

    def ratio(each: Point) -> float | None:
        if base is None or not base.mean or each.mean is None or each.runs != base.runs:
            return None
        found = each.mean / base.mean
        return found if math.isfinite(found) else None

    return {each.length: ratio(each) for each in values}


def best_at(by_method: Sequence[Sequence[Point]]) -> dict[int, float]:
    """The lowest mean at each length that at least two methods were tested at."""
    found: dict[int, list[float]] = {}
    for values in by_method:
        for each in values:
            if each.mean is not None:
                found.setdefault(each.length, []).append(each.mean)
    return {length: min(means) for length, means in found.items() if len(means) > 1}


def loss_by_position(
    method: Method, protocols: Protocols, protocol: str, length: int
) -> list[tuple[int, int, float, int]]:
    """First and last place (from 1), mean loss in nats and count of each bin that scored anything; seeds pooled."""
    pooled = _pooled([_bins(each) for each in records_at(method, protocols, protocol).get(length, [])])
    return [(low, high, total / count, int(count)) for (low, high), (total, count) in sorted(pooled.items())]


def loss_by_place(method: Method, protocols: Protocols, protocol: str, length: int) -> list[Bin]:
    """The same in bins that are merged until each has tokens enough; one ends where training windows did."""
    by_seed = [found for each in records_at(method, protocols, protocol).get(length, []) if (found := _bins(each))]
    merged = []
    for spans in _merged(_pooled(by_seed), method.length):
        sums = [[sum(found.get(span, (0.0, 0.0))[part] for span in spans) for part in (0, 1)] for found in by_seed]
        losses = [total / count for total, count in sums if count]
        total, count = (sum(each[part] for each in sums) for part in (0, 1))
        deviation = statistics.stdev(losses) if len(losses) > 1 else None
        merged.append(Bin(spans[0][0], spans[-1][1], total / count, int(count), deviation))
    return merged


Span = tuple[int, int]
Sums = dict[Span, tuple[float, float]]  # by first and last place: the sum of losses and the count


def _bins(record: Values) -> Sums:
    binned = mapping(record.get("loss_by_position"))
    parts = [binned.get(name) for name in ("edges", "nll_sum", "count")]
    if not all(isinstance(part, list) for part in parts):
        return {}
    edges, sums, counts = ([number(each) for each in part or []] for part in parts)
    return {
        (int(low) + 1, int(high)): (total, count)
        for low, high, total, count in zip(edges, edges[1:], sums, counts, strict=False)
        if low is not None and high is not None and total is not None and count and count > 0 and high > low >= 0
    }


def _pooled(found: Iterable[Sums]) -> Sums:
    pooled: Sums = {}
    for bins in found:
        for span, (total, count) in bins.items():
            before = pooled.get(span, (0.0, 0.0))
            pooled[span] = before[0] + total, before[1] + count
    return pooled


def _merged(bins: Sums, trained: int | None) -> list[list[Span]]:
    """Neighbours together, until they have `FEW` tokens, or an eighth of all where those are not many."""
    enough = min(FEW, sum(count for _, count in bins.values()) / 8)
    groups, group, tokens = list[list[Span]](), list[Span](), 0.0
    for span in sorted(bins):
        group.append(span)
        tokens += bins[span][1]
        if tokens >= enough or (span[1] == trained and tokens >= enough / 4):
            groups.append(group)
            group, tokens = [], 0.0
    if group and groups:
        groups[-1] += group
    return groups


def curve(run: Run, limit: int) -> Curve | None:
    """At most `limit` places of the training curve; None where nothing was logged."""
    rows = [(row["step"], number(row.get("seconds")), number(row.get("loss"))) for row in run.metrics]
    logged = [(step, seconds, loss) for step, seconds, loss in rows if loss is not None]
    found = [(row["step"], number(row.get("validation_loss"))) for row in run.metrics]
    validation = [(step, loss) for step, loss in found if loss is not None]
    validation = validation[:: max(1, math.ceil(len(validation) / limit))]
    if not logged and not validation:
        return None
    size = max(1, math.ceil(len(logged) / limit))
    steps, times, losses = [], [], []
    for start in range(0, len(logged), size):
        part = logged[start : start + size]
        steps.append(statistics.fmean(step for step, _, _ in part))
        losses.append(statistics.fmean(loss for _, _, loss in part))
        known = [seconds for _, seconds, _ in part if seconds is not None]
        times.append(round(statistics.fmean(known), 3) if known else None)
    return Curve(run, [round(step, 1) for step in steps], times, [round(each, 5) for each in losses], validation)
