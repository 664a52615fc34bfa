"""The charts of the page, as plain descriptions that plotly.js draws; each says what it shows and how it was made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainshort.common.machine import LOADED
from trainshort.report.methods import Method
from trainshort.report.records import number
from trainshort.report.series import Curve, Point, Protocols, loss_by_position, points, records_at
from trainshort.report.tables import Table

Plot = dict[str, Any]
FIGURES = {
    "perplexity": "perplexity per token",
    "perplexity_per_word": "perplexity per word",
    "bits_per_byte": "bits per byte",
}
OTHER_TOKENS = (
    "These models have different tokenizers: lengths are in tokens of each, figures are per byte and per word of the "
    "same text. Figures per token can't be compared between them; the CSV file has them."
)
OTHER_LOSSES = (
    "These models have different tokenizers: the heights of their lines, which are per token, can't be compared, "
    "only whether each rises or falls."
)
MACHINE = ("device", "threads")  # speed and memory are means over runs that were tested on the same


@dataclass(frozen=True)
class View:
    """One way to look at a chart, chosen by name."""

    name: str
    traces: list[Plot]
    layout: Plot


@dataclass(frozen=True)
class Chart:
    """name: what kind of chart it is; with the suffix of its test, `id` names its element and files.

    sentence: what it shows and how it was measured.
    """

    name: str
    title: str
    sentence: str
    views: list[View]
    table: Table | None = None
    axes: str = ""  # those that the reader may switch between logarithmic and linear: "xy" or "x"
    listed: bool = True  # whether the page also has the table as text
    notes: list[str] = field(default_factory=list)
    suffix: str = ""

    @property
    def id(self) -> str:
        return self.name + self.suffix


def plotly_text(text: str) -> str:
    """plotly reads tags and entities in its texts: these stay what they are."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def line(method: Method, x: Sequence[Any], y: Sequence[Any], **more: Any) -> Plot:
    name = plotly_text(method.label)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": method.color, "dash": method.dash, "width": 2},
        "marker": {"color": method.color, "symbol": method.marker, "size": 8},
    } | more


def axis(title: str, kind: str = "linear", ticks: Sequence[int] = ()) -> Plot:
    found: Plot = {"title": {"text": title}, "type": kind}
    if ticks:
        found |= {"tickmode": "array", "tickvals": list(ticks), "ticktext": [f"{each:,}" for each in ticks]}
    return found


def with_deviation(trace: Plot, values: Sequence[Point]) -> Plot:
    if any(each.deviation is not None for each in values):
        array = [each.deviation or 0.0 for each in values]
        trace = trace | {"error_y": {"type": "data", "array": array, "thickness": 1.2, "width": 4}}
    return trace


def by_length(
    methods: Sequence[Method],
    protocols: Protocols,
    protocol: str,
    name: str,
    title: str,
    *,
    scale: float = 1.0,
    from_zero: bool = False,
    alike: Sequence[str] = (),
) -> View | None:
    """A figure against the test length, one line a method; the training lengths are dotted lines."""
    traces, lengths = [], set[int]()
    low, high = math.inf, 0.0
    for method in methods:
        values = [
            Point(
                each.length, each.mean * scale, None if each.deviation is None else each.deviation * scale, each.seeds
            )
            for each in points(method, protocols, protocol, name, alike)
            if each.mean is not None
        ]
        if values:
            lengths |= {each.length for each in values}
            means = [each.mean for each in values if each.mean is not None]
            low, high = min(low, *means), max(high, *means)
            trace = line(method, [each.length for each in values], [_round(mean) for mean in means])
            traces.append(with_deviation(trace, values))
    if not traces:
        return None
    kind = "log" if low > 0 and high > 4 * low and not from_zero else "linear"
    layout = {
        "xaxis": axis("test length in tokens", "log", sorted(lengths)),
        "yaxis": axis(title, kind) | ({"rangemode": "tozero"} if from_zero else {}),
        "shapes": [trained_at(length) for length in sorted({method.length or 0 for method in methods}) if length],
    }
    return View(title, traces, layout)


def extrapolation(
    methods: Sequence[Method], protocols: Protocols, protocol: str, table: Table, how: str, figure: str
) -> Chart:
    """figure: what is compared; where that is bits per byte, tokens differ, and figures per token are left out."""
    names = list(FIGURES.items()) if figure == "perplexity" else list(FIGURES.items())[:0:-1]
    views = [by_length(methods, protocols, protocol, name, title) for name, title in names]
    seeds = max((len(method.runs) for method in methods), default=1)
    bars = "; bars are one standard deviation over seeds" if seeds > 1 else ""
    return Chart(
        "extrapolation",
        "Train short, test long",
        f"{'Perplexity' if figure == 'perplexity' else 'Bits per byte'} (lower is better) by the length of the "
        f"windows that a trained model is tested on, each over {how}; dotted lines mark training lengths{bars}.",
        [view for view in views if view is not None],
        table,
        axes="xy",
        notes=[] if figure == "perplexity" else [OTHER_TOKENS],
    )


def against_sliding(methods: Sequence[Method], protocols: Protocols, table: Table, figure: str) -> Chart:
    traces, lengths = [], set[int]()
    for place, protocol in enumerate(protocols.names):
        for method in methods:
            values = [each for each in points(method, protocols, protocol, figure) if each.mean is not None]
            if values:
                lengths |= {each.length for each in values}
                trace = line(method, [each.length for each in values], [_round(each.mean) for each in values])
                trace["name"] += f", {protocol}"
                trace["line"] = trace["line"] | {"dash": ("solid", "dash", "dot", "dashdot")[place % 4]}
                if place:
                    trace["marker"] = trace["marker"] | {"symbol": f"{method.marker}-open"}
                traces.append(with_deviation(trace, values))
    layout = {
        "xaxis": axis("test length in tokens", "log", sorted(lengths)),
        "yaxis": axis(FIGURES[figure], "log"),
    }
    return Chart(
        "sliding",
        "Nonoverlapping against sliding windows",
        "The same models with windows side by side, where the first tokens of each have little context, and with "
        "windows that overlap so that every token has much: the part of a gain that sliding windows do not show is "
        "only the early token curse.",
        [View(FIGURES[figure], traces, layout)],
        table,
        axes="xy",
    )


def by_position(
    methods: Sequence[Method], protocols: Protocols, protocol: str, lengths: Sequence[int], figure: str
) -> Chart:
    views, rows = [], []
    for length in sorted(lengths, reverse=True):
        traces = []
        for method in methods:
            bins = loss_by_position(method, protocols, protocol, length)
            rows += [(method.label, protocol, length, *each) for each in bins]
            if bins:
                middles = [round(math.sqrt(low * high), 2) for low, high, _, _ in bins]
                shown = [f"places {low:,} to {high:,}" for low, high, _, _ in bins]
                hover = {"text": shown, "hovertemplate": "%{y:.4f} nats, %{text}"}
                traces.append(line(method, middles, [_round(loss) for _, _, loss, _ in bins], **hover))
        if traces:
            layout = {"xaxis": axis("place in the window", "log"), "yaxis": axis("loss in nats per token")}
            views.append(View(f"windows of {length:,}", traces, layout))
    columns = ("method", "windows", "tested_at", "first_place", "last_place", "loss", "scored_tokens")
    return Chart(
        "loss_by_position",
        "Loss by place in the window",
        f"Mean loss of the tokens at each place of {protocol} windows, in two bins an octave: falling means that the "
        "model uses the longer context, rising that it is lost beyond its training length.",
        views,
        Table(columns, tuple(rows)),
        axes="xy",
        listed=False,
        notes=[] if figure == "perplexity" else [OTHER_LOSSES],
    )


def training(curves: Sequence[tuple[Method, Curve]]) -> Chart:
    views = []
    for name, title in (("steps", "step"), ("seconds", "seconds of training")):
        traces, named = [], set()
        for method, curve in curves:
            x = curve.steps if name == "steps" else curve.seconds
            label = plotly_text(curve.run.name)
            if curve.losses and any(each is not None for each in x):
                more: Plot = {"mode": "lines", "showlegend": method.label not in named}
                more["hovertemplate"] = "%{y:.4f}<extra>%{meta}</extra>"
                traces.append(line(method, x, curve.losses, meta=label, **more))
                named.add(method.label)
            if curve.validation and name == "steps":
                steps, losses = zip(*curve.validation, strict=True)
                hover = "validation %{y:.4f}<extra>%{meta}</extra>"
                traces.append(
                    line(method, steps, losses, mode="markers", showlegend=False, meta=label, hovertemplate=hover)
                )
        if traces:
            views.append(View(f"by {title}", traces, {"xaxis": axis(title), "yaxis": axis("loss in nats per token")}))
    rows = [
        (method.label, curve.run.name, curve.run.seed, step, seconds, loss)
        for method, curve in curves
        for step, seconds, loss in zip(curve.steps, curve.seconds, curve.losses, strict=True)
    ]
    return Chart(
        "training",
        "Training curves",
        "Training loss of every run as its metrics.jsonl logged it, averaged over stretches of steps where there "
        "are many; markers are validation losses at the training length, where they were asked for.",
        views,
        Table(("method", "run", "seed", "step", "seconds", "loss"), tuple(rows)),
        axes="xy",
        listed=False,
    )


def cost(methods: Sequence[Method], protocols: Protocols, protocol: str, how: str) -> Chart:
    names = (("tokens_per_second", "scored tokens per second", 1.0), ("peak_memory_bytes", "peak memory in MB", 1e-6))
    views = [
        by_length(methods, protocols, protocol, name, title, scale=scale, from_zero=True, alike=MACHINE)
        for name, title, scale in names
    ]
    columns = ("method", "windows", "tested_at", "tokens_per_second", "peak_memory_bytes", "seeds", "left_out")
    rows, notes = [], list[str]()
    for method in methods:
        speed, memory = (points(method, protocols, protocol, name, MACHINE) for name, _, _ in names)
        for one, other in zip(speed, memory, strict=True):
            rows.append((method.label, protocol, one.length, one.mean, other.mean, one.seeds, one.skipped))
        notes += [f"{method.label} at {each.length:,}: {each.skipped}" for each in speed if each.skipped]
        notes += _loaded(method, protocols, protocol)
    return Chart(
        "cost",
        "Speed and memory by length",
        "Scored tokens a second, and the peak memory of the whole process (of the GPU where there is one), while "
        f"each length was evaluated{how}.",
        [view for view in views if view is not None],
        Table(columns, tuple(rows)),
        axes="xy",
        notes=notes,
    )


def _loaded(method: Method, protocols: Protocols, protocol: str) -> list[str]:
    """Which speeds are not those of the machine, because others were using it."""
    shares = {
        length: max((number(each.get("waiting")) or 0.0 for each in records), default=0.0)
        for length, records in records_at(method, protocols, protocol).items()
    }
    found = [f"{length:,} ({share:.0%})" for length, share in shares.items() if share > LOADED]
    what = "measured on a loaded machine; in brackets the part of the time that threads waited for a core"
    return [f"{method.label} at {', '.join(found)}: {what}."] if found else []


def trained_at(length: int) -> Plot:
    return {
        "type": "line",
        "x0": length,
        "x1": length,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"dash": "dot", "width": 1, "color": "#888888"},
    }


def _round(value: float | None) -> float | None:
    """Six figures are enough to draw; tables keep them all."""
    return None if value is None else float(f"{value:.6g}")
