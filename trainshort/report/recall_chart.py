"""What models recall: the share of right answers by length and by depth in the window, with the level of chance."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainshort.report.charts import Chart, Plot, View, axis, labelled, line
from trainshort.report.length_charts import trained_lengths
from trainshort.report.methods import Method
from trainshort.report.records import Values
from trainshort.report.tables import Table
from trainshort.report.text import clean

TASKS = {"passkey": "a passkey", "copy": "a passage"}
SAME = ("data", "split", "depths", "trials", "choices", "seed")  # what trials must share to stand in one chart
COLUMNS = ("method", "task", "tested_at", "depth", "right", "trials", "chance", "seeds")


def recall_charts(methods: Sequence[Method]) -> list[Chart]:
    """One for each set of trials that models were tested with, the largest first.

    Where a single run has figures of the same trials in several dtypes, there is one for each dtype.
    """
    every = [(method, run, each) for method in methods for run in method.runs for each in run.recall]
    measured = [(method, run, record) for method, run, record in every if "correct" in record]
    dtypes: dict[tuple[str, str], set[str]] = {}
    for _, run, record in measured:
        dtypes.setdefault((_trials_of(record), run.folder), set()).add(record["dtype"])
    several = {trials for (trials, _), found in dtypes.items() if len(found) > 1}
    groups: dict[tuple[str, str | None], list[tuple[Method, Values]]] = {}
    for method, _, record in measured:
        trials = _trials_of(record)
        groups.setdefault((trials, record["dtype"] if trials in several else None), []).append((method, record))
    ordered = sorted(groups.values(), key=len, reverse=True)
    return [_chart(found, "" if place == 1 else f"_{place}") for place, found in enumerate(ordered, 1)]


def _trials_of(record: Values) -> str:
    return repr([record.get(name) for name in SAME])


def _chart(found: Sequence[tuple[Method, Values]], suffix: str) -> Chart:
    first = found[0][1]
    chance = 1.0 / first["choices"]
    methods = list({id(method): method for method, _ in found}.values())
    tasks = [task for task in TASKS if any(record["task"] == task for _, record in found)]
    views = [_by_length(task, methods, found, chance) for task in tasks]
    views += [_by_depth(task, methods, found, chance) for task in tasks]
    dtypes = " and ".join(sorted({clean(record["dtype"]) for _, record in found}))
    rows = []
    for task in tasks:
        for method in methods:
            for length, shares in _shares(task, method, found).items():
                for depth, values in zip(first["depths"], zip(*shares, strict=True), strict=True):
                    right = statistics.fmean(values)
                    rows.append((method.label, task, length, depth, right, first["trials"], chance, len(values)))
    table = Table(COLUMNS, tuple(rows))
    return Chart(
        "recall",
        "Recall",
        "Recall",
        f"How often a model tells which of {first['choices']} answers stood in its window, after a cue that comes "
        f"again at its end: {first['trials']} windows for each length and depth, in {dtypes}. A passkey is a few "
        "tokens that nobody could guess, a passage is a piece of the text; the dashed line is chance. Perplexity "
        "says little about this: most tokens can be guessed from those just before.",
        views,
        table,
        listed=table,
        suffix=suffix,
    )


def _shares(task: str, method: Method, found: Sequence[tuple[Method, Values]]) -> dict[int, list[list[float]]]:
    """By length the shares of right answers at each depth, for every seed."""
    shares: dict[int, list[list[float]]] = {}
    for other, record in found:
        if other is method and record["task"] == task:
            each = [count / record["trials"] for count in record["correct"]]
            shares.setdefault(record["length"], []).append(each)
    return dict(sorted(shares.items()))


def _by_length(task: str, methods: Sequence[Method], found: Sequence[tuple[Method, Values]], chance: float) -> View:
    traces, lengths = list[Plot](), set[int]()
    for method in methods:
        shares = _shares(task, method, found)
        means = [statistics.fmean(value for seed in seeds for value in seed) for seeds in shares.values()]
        if shares:
            lengths |= set(shares)
            traces.append(_labelled(method, list(shares), means))
    ticks = sorted(lengths)
    traces.append(_chance([ticks[0], ticks[-1]], chance))
    layout = {"xaxis": axis("test length in tokens", "log", ticks), "yaxis": _share_axis()}
    return View(f"{TASKS[task]}, by length", traces, layout, trained_lengths(methods))


def _by_depth(task: str, methods: Sequence[Method], found: Sequence[tuple[Method, Values]], chance: float) -> View:
    """At the longest length that every method was tested at."""
    by_method = {method.label: _shares(task, method, found) for method in methods}
    common = set.intersection(*(set(shares) for shares in by_method.values() if shares))
    every = set().union(*by_method.values())
    length = max(common or every)
    depths = next(record["depths"] for _, record in found)
    traces = []
    for method in methods:
        if seeds := by_method[method.label].get(length):
            means = [statistics.fmean(values) for values in zip(*seeds, strict=True)]
            traces.append(_labelled(method, depths, means))
    traces.append(_chance([min(depths), max(depths)], chance))
    title = "depth of the answer in the window, in percent (100: just before the cue)"
    return View(f"{TASKS[task]}, by depth at {length:,}", traces, {"xaxis": axis(title), "yaxis": _share_axis()})


def _labelled(method: Method, x: Sequence[int], shares: Sequence[float]) -> Plot:
    return labelled(line(method, x, [round(each, 5) for each in shares]), [f"{each:.0%}" for each in shares])


def _share_axis() -> Plot:
    return axis("share of right answers") | {"range": [0, 1.03], "tickformat": ".0%"}


def _chance(x: Sequence[int], chance: float) -> Plot:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "chance",
        "x": list(x),
        "y": [round(chance, 5)] * 2,
        "line": {"color": "#888888", "dash": "dash", "width": 1.5},
        "hovertemplate": f"<b>{chance:.0%}</b>  chance<extra></extra>",
        "meta": {"end": "chance", "value": f"{chance:.0%}"},
    }
