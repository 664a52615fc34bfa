"""Charts of ALiBi's heads: what certified windows kept, and the bias with the window drawn onto it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from trainshort.report.charts import Chart, View, axis, plotly_text
from trainshort.report.heads import Seen, distances, few_heads, slopes_of, widest
from trainshort.report.methods import COLORS
from trainshort.report.tables import Table

# From nothing to everything; reversed where small values are what should stand out.
PALE, STRONG = "#f1f4f8", "#0b5cad"


def kept(seen: Sequence[Seen]) -> Chart:
    """Heat maps, the longest length of each method first."""
    views, rows = [], []
    several = len({each.method.label for each in seen}) > 1
    ordered = sorted(seen, key=lambda each: -each.length)
    for name, title, unit in (
        ("skipped", "share skipped", ":.1%"),
        ("reach", "mean reach in tokens", ":,.0f"),
        ("farthest", "farthest reach in tokens", ":,.0f"),
    ):
        for each in ordered:
            values = getattr(each, name)
            if values is not None:
                label = f"{title}, tested at {each.length:,}" + (f", {each.method.label}" if several else "")
                views.append(View(label, [heat(values, name == "skipped", unit)], grid_layout(values)))
    for each in ordered:
        for layer, row in enumerate(each.kept):
            for head, value in enumerate(row):
                reach = None if each.reach is None else each.reach[layer][head]
                farthest = None if each.farthest is None else each.farthest[layer][head]
                rows.append((each.method.label, each.length, layer + 1, head + 1, value, reach, farthest))
    return Chart(
        "kept",
        "What certified windows skip, by layer and head",
        "Heads",
        "The share of key blocks in sight that ALiBi attention never visits, because they are proved not to matter, "
        "and how many tokens back from the last query of a block the first visited key lies; measured on the queries "
        "and keys of the model itself in one window of the test text, in blocks of 128 keys.",
        views,
        Table(("method", "tested_at", "layer", "head", "kept", "reach", "farthest"), tuple(rows)),
        listed=_skipped_table(ordered[0]),
        lead=_skipped_sentence(ordered),
    )


def _skipped_table(seen: Seen) -> Table:
    """The first heat map in figures: layers down, heads across."""
    heads = tuple(f"head {head + 1}" for head in range(len(seen.kept[0])))
    rows = tuple((layer + 1, *(f"{value:.0%}" for value in row)) for layer, row in enumerate(seen.skipped))
    return Table(("layer", *heads), rows)


def _skipped_sentence(ordered: Sequence[Seen]) -> str:
    """How much is skipped at the longest length, and by which heads."""
    first = ordered[0]
    every = [value for row in first.skipped for value in row]
    none = sum(value <= 0 for value in every)
    if none == len(every):
        return f"At {first.length:,} tokens {first.method.label} skips nothing: in short texts looking would not pay."
    said = (
        f"At {first.length:,} tokens {first.method.label} skips {statistics.fmean(every):.0%} of all key blocks in "
        f"sight, in its nearest-sighted head {max(every):.0%}"
    )
    return said + (f"; {none} of {len(every)} heads see everything." if none else "; every head skips some.")


def bias(seen: Sequence[Seen]) -> Chart | None:
    """The bias of a few heads over distance: a full line as far as any query looks, dotted where none does."""
    views, rows = [], []
    longest: dict[str, Seen] = {}
    for each in seen:
        if each.method.label not in longest or each.length > longest[each.method.label].length:
            longest[each.method.label] = each
    for each in longest.values():
        slopes = slopes_of(each.method.runs[0])
        if slopes is None or len(slopes) != len(each.kept[0]):
            continue
        traces, deepest = [], 0.0
        for place, head in enumerate(few_heads(slopes)):
            reach, farthest = widest(each, head)
            traces += _drawn(place, head, slopes[head], each.length, reach, farthest)
            deepest = min(deepest, -slopes[head] * (reach or 0.0))
            rows.append((each.method.label, each.length, head + 1, slopes[head], reach, farthest))
        layout = {
            "xaxis": axis("distance from query to key in tokens", "log"),
            "yaxis": axis("bias added to the score, in nats") | {"range": [1.1 * min(deepest, -10.0), 1]},
        }
        views.append(View(f"{each.method.label}, tested at {each.length:,}", traces, layout))
    if not views:
        return None
    return Chart(
        "bias",
        "The bias and the certified window of a few heads",
        "Bias",
        "ALiBi's penalty on distance for heads from the steepest to the flattest slope: full lines end at the "
        "farthest key that any query visited in any layer, in one window of the longest test length; markers stand "
        "at the mean reach; the dotted rest was proved not to matter.",
        views,
        table := Table(("method", "tested_at", "head", "slope", "mean_reach", "farthest"), tuple(rows)),
        axes="x",
        listed=table,
    )


def heat(values: list[list[float]], fraction: bool, unit: str, reverse: bool = False) -> dict[str, Any]:
    """reverse: small values stand out."""
    heads = [str(head + 1) for head in range(len(values[0]))]
    layers = [str(layer + 1) for layer in range(len(values))]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": heads,
        "y": layers,
        "z": [[float(f"{value:.4g}") for value in row] for row in values],  # enough for a colour and a tooltip
        "colorscale": [[0, PALE], [1, STRONG]],
        "reversescale": reverse,
        "xgap": 3,
        "ygap": 3,
        "colorbar": {"thickness": 12, "tickformat": ".0%" if fraction else ",d"},
        "hovertemplate": f"layer %{{y}}, head %{{x}}: %{{z{unit}}}<extra></extra>",
    }
    if fraction:
        trace |= {"zmin": 0, "zmax": 1}
    if len(values) * len(heads) <= 128:
        trace |= {"texttemplate": "%{z" + (":.0%" if fraction else ":,.0f") + "}", "textfont": {"size": 12}}
    return trace


def grid_layout(values: list[list[float]]) -> dict[str, Any]:
    return {
        "xaxis": axis("head") | {"type": "category"},
        "yaxis": axis("layer") | {"type": "category", "autorange": "reversed"},
        "height": max(300, min(900, 120 + 34 * len(values))),
    }


def _drawn(
    place: int, head: int, slope: float, length: int, reach: float | None, farthest: float | None
) -> list[dict[str, Any]]:
    color = COLORS[place % len(COLORS)]
    end = length if farthest is None else min(farthest, length)
    near = sorted({each for each in distances(length) if each <= end} | {round(end)})
    far = [round(end)] + [each for each in distances(length) if each > end]
    name = plotly_text(f"head {head + 1}, slope {slope:.3g}")
    common = {"type": "scatter", "legendgroup": name, "name": name}
    hover = {"hovertemplate": f"<b>%{{y:.2f}}</b>  {name}<extra></extra>"}
    traces: list[dict[str, Any]] = [
        common
        | hover
        | {"mode": "lines", "x": near, "y": [-slope * each for each in near], "line": {"color": color, "width": 3}}
    ]
    dotted = {"color": color, "width": 1.5, "dash": "dot"}
    if len(far) > 1:
        y = [-slope * each for each in far]
        traces.append(common | hover | {"mode": "lines", "x": far, "y": y, "line": dotted, "showlegend": False})
    if reach is not None:
        traces.append(
            common
            | {"mode": "markers", "x": [reach], "y": [-slope * reach], "showlegend": False}
            | {"marker": {"color": color, "size": 10, "symbol": "diamond"}}
            | {"hovertemplate": f"mean reach of {name}<extra></extra>"}
        )
    return traces
