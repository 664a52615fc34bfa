"""What a chart is, and the parts that charts are made of: plain descriptions that plotly.js and matplotlib draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainshort.report.methods import Method
from trainshort.report.series import Point
from trainshort.report.tables import Table
from trainshort.report.text import significant

Plot = dict[str, Any]
MANIFOLD = 2.5  # from the lowest value to the highest: beyond this a scale is logarithmic
EXPLODED = 20.0  # beyond this even a logarithmic scale puts close methods on top of each other
WIDTH = 0.02  # a stretched scale is about linear up to this far above its floor, then about logarithmic
FARTHEST, ASTRONOMICAL = 1e12, 1e100
ROUND = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True)
class Stretch:
    """A scale that is finest just above `floor`: the height of a value is asinh((value / floor - 1) / width)."""

    floor: float
    width: float
    ticks: list[float]


@dataclass(frozen=True)
class View:
    """One way to look at a chart, chosen by name.

    trained: training lengths, on the axis across; what lies beyond the largest is shaded. stretch: a scale for
    heights that the reader may choose; is_stretched: it is the one to begin with.
    """

    name: str
    traces: list[Plot]
    layout: Plot
    trained: tuple[int, ...] = ()
    stretch: Stretch | None = None
    is_stretched: bool = False


@dataclass(frozen=True)
class Chart:
    """name: what kind of chart it is; with the suffix of its test, `id` names its element and files.

    short: its title in the navigation. sentence: what it shows and how it was measured. lead: what was found.
    captions: the sentence of each view, where they differ.
    """

    name: str
    title: str
    short: str
    sentence: str
    views: list[View]
    table: Table | None = None
    axes: str = ""  # those that the reader may switch between logarithmic and linear: "xy" or "x"
    listed: Table | None = None  # the table as the page shows it, where it does
    notes: list[str] = field(default_factory=list)
    lead: str = ""
    suffix: str = ""
    captions: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return self.name + self.suffix


def plotly_text(text: str) -> str:
    """plotly reads tags and entities in its texts: these stay what they are."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def template_text(text: str) -> str:
    """A name, as `plotly_text` gives it, inside of a template for tooltips: braces in it are no fields."""
    return text.replace("%{", "%&#123;")


def line(method: Method, x: Sequence[Any], y: Sequence[Any], **more: Any) -> Plot:
    """One method's line; the one that is emphasised is wider and lies above the others."""
    name = plotly_text(method.label)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": method.color, "dash": method.dash, "width": 4 if method.strong else 2},
        "marker": {"color": method.color, "symbol": method.marker, "size": 9 if method.strong else 7},
        "zorder": 1 if method.strong else 0,
    } | more


def labelled(trace: Plot, values: Sequence[str]) -> Plot:
    """With its name and last value at its right end, and rounded values in the tooltip."""
    last = next((text for text, y in zip(reversed(values), reversed(trace["y"]), strict=True) if y is not None), "")
    return trace | {
        "text": list(values),
        "hovertemplate": f"<b>%{{text}}</b>  {template_text(trace['name'])}<extra></extra>",
        "meta": {"end": trace["name"], "value": last},
    }


def band(method: Method, x: Sequence[float], low: Sequence[float | None], high: Sequence[float | None]) -> Plot:
    """One standard deviation to both sides, below the line."""
    name = plotly_text(method.label)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{name}, spread",
        "legendgroup": name,
        "showlegend": False,
        "zorder": -1,
        "x": [*x, *reversed(x)],
        "y": [*low, *reversed(high)],
        "fill": "toself",
        "fillcolor": faded(method.color, 0.18),
        "line": {"color": method.color, "width": 0},
        "hoverinfo": "skip",
    }


def with_band(method: Method, values: Sequence[Point]) -> list[Plot]:
    """The line of means, and where there are several seeds their band."""
    known = [(each.length, each.mean, each.deviation) for each in values if each.mean is not None]
    x, means = [length for length, _, _ in known], [mean for _, mean, _ in known]
    spread = ["" if deviation is None else f" ± {significant(deviation, like=mean)}" for _, mean, deviation in known]
    texts = [significant(mean) + each for mean, each in zip(means, spread, strict=True)]
    trace = labelled(line(method, x, [rounded(mean) for mean in means]), texts)
    trace["meta"]["value"] = significant(means[-1])
    if all(deviation is None for _, _, deviation in known):
        return [trace]
    spreads = [deviation or 0.0 for _, _, deviation in known]
    low = [rounded(max(mean - deviation, mean / 1000)) for mean, deviation in zip(means, spreads, strict=True)]
    high = [rounded(mean + deviation) for mean, deviation in zip(means, spreads, strict=True)]
    return [trace, band(method, x, low, high)]


def faded(color: str, opacity: float) -> str:
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def axis(title: str, kind: str = "linear", ticks: Sequence[int] = ()) -> Plot:
    found: Plot = {"title": {"text": title}, "type": kind}
    if ticks:
        found |= {"tickmode": "array", "tickvals": list(ticks), "ticktext": [f"{each:,}" for each in ticks]}
    return found


def scale_of(values: Iterable[float]) -> tuple[str, Stretch | None, bool]:
    """For figures above zero: linear or logarithmic, a stretched scale, and whether to begin with that one."""
    known = list(values)
    low, high = min(known), max(known)
    if low <= 0:
        return "linear", None, False
    kind = "log" if high > MANIFOLD * low else "linear"
    stretch = stretched(low, high)
    return kind, stretch, stretch is not None and high > EXPLODED * low


def stretched(low: float, high: float) -> Stretch | None:
    """From just below the lowest value to the highest; None where all are the same, or too far apart to draw."""
    floor = low / 1.01
    if not 1.01 * low < high < FARTHEST * low:
        return None
    top = math.asinh((high / floor - 1) / WIDTH)
    places = [floor * (1 + WIDTH * math.sinh(top * place / 8)) for place in range(9)]
    return Stretch(floor, WIDTH, sorted({_round_number(each, floor) for each in places if each >= floor}))


def _round_number(value: float, floor: float) -> float:
    """Near the floor three figures, farther away two, and then one that is easy to read."""
    if value < 1.5 * floor:
        return float(f"{value:.3g}")
    size = 10.0 ** math.floor(math.log10(value))
    return float(f"{min(ROUND, key=lambda each: abs(each - value / size)) * size:.3g}")


def rounded(value: float | None) -> float | None:
    """Six figures are enough to draw, and what is astronomical no chart can show; tables keep them all."""
    return None if value is None or abs(value) > ASTRONOMICAL else float(f"{value:.6g}")
