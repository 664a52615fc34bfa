"""The page of an inspection: what each head of a model can provably see of a text, and how much of that mattered.

Reads what `trainshort.evaluation.inspection` measured, as its file holds it. Never needs torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainshort.report.build import plotly_js, write_files
from trainshort.report.charts import Chart, Plot, View, axis, plotly_text
from trainshort.report.elements import download_html, figure_html, quiet, table_html
from trainshort.report.figures import HEAD_FIGURES
from trainshort.report.figures import drawn as files_of
from trainshort.report.head_charts import grid_layout, heat
from trainshort.report.heads import few_heads
from trainshort.report.methods import COLORS
from trainshort.report.page import Lead, Section, document
from trainshort.report.tables import Table
from trainshort.report.text import escaped

PAGE = "inspection.html"
GREY = "#7a8793"
LEAST = 1e-6  # of a query's attention that is drawn
SHARES = {
    "tickmode": "array",
    "tickvals": [10.0**-power for power in range(7)],
    "ticktext": ["100%", "10%", "1%", "0.1%", "0.01%", "0.001%", "0.0001%"],
}
FIGURES = (*(f"heads_{name}" for name in HEAD_FIGURES.values()), "visited", "distance", "positions")
MANY = 8  # heads in one chart of lines
DASHES = ("solid", "dash", "dot", "dashdot")
Values = Mapping[str, Any]

# Of the heat maps: the figure, what it is called, and how it is written.
HEADS = (
    ("seen", "share of keys that it can see", ":.1%"),
    ("reach", "how far it can see in tokens, mean", ":,.0f"),
    ("farthest", "how far it can see in tokens, farthest query", ":,.0f"),
    ("needed", "99% of attention within, tokens, mean", ":,.0f"),
    ("most_needed", "99% of attention within, tokens, farthest query", ":,.0f"),
    ("mattered", "share of the keys it can see that mattered", ":.1%"),
    ("visited", "share of keys that attention visits", ":.1%"),
)
WINDOWS = ("visited", "can_see", "mean_reach", "farthest_reach", "largest_skipped", "bound")  # columns about them
WITHOUT_WINDOWS = ("needed", "most_needed", "mattered")  # what is to be seen where nothing can be skipped


def build_inspection(found: Values, out: str | Path, *, figures: bool = True, dots: int = 200) -> Path:
    """Write the page, with figures and tables beside it, into the folder `out`; returns the path of the page."""
    plotly = plotly_js(figures)
    drawn = [by_head(found), by_distance(found), by_position(found)]
    tables = {"looks": looks_table(found)}
    if found["penalty"]:
        drawn.insert(1, by_length(found))
        tables["layers"] = layers_table(found)
    tables |= {chart.id: chart.table for chart in drawn if chart.table is not None}
    files = {f"tables/{name}.csv": table.csv.encode() for name, table in tables.items()}
    if figures:
        for chart in drawn:
            files |= {f"figures/{name}": data for name, data in files_of(chart, dots)}
    csv = {name: table.csv for name, table in tables.items()}
    files[PAGE] = document(_lead(found), _sections(found, drawn), drawn, csv, plotly).encode("utf-8")
    write_files(Path(out), files)
    for path in (Path(out) / "figures").glob("*"):  # of an earlier inspection
        if path.stem in FIGURES and f"figures/{path.name}" not in files:
            path.unlink()
    return Path(out) / PAGE


def summary(found: Values) -> list[str]:
    """The most important of it, in sentences."""
    heads, length = found["heads"], found["length"]
    visited, seen = (statistics.fmean(_flat(heads[name])) for name in ("visited", "seen"))
    needed = sorted(_flat(heads["needed"]))
    layer, head = farthest_head(found)
    most = heads["needed"][layer][head]
    lines = [
        f"At {length:,} tokens {1 - seen:.1%} of the keys in sight are proved not to matter, over all layers and "
        f"heads; attention, which works in whole blocks, visits {visited:.1%}."
        if found["penalty"]
        else f"With {found['position']} positions no key can be proved not to matter, because attention does not "
        "fade with distance in a way that could be proved: it visits all in sight.",
        f"{found['share']:.0%} of a query's attention lies, on average over the text, within {needed[0]:,.0f} tokens "
        f"in the nearest-sighted head, {statistics.median(needed):,.0f} in the median head and {most:,.0f} in the "
        f"farthest-sighted, head {head + 1} of layer {layer + 1}.",
    ]
    trained = found["about"].get("length")
    if trained and trained < length:
        far = sum(value > trained for value in needed)
        lines.append(
            f"It was trained at {trained:,} tokens: {far:,} of {len(needed):,} heads need more than that on average, "
            "so they use distances they were never trained on."
            if far
            else f"It was trained at {trained:,} tokens, and no head needs more than that on average."
        )
    return lines


def bound_sentence(found: Values) -> str:
    """What leaving keys out can cost."""
    if not found["penalty"] or not found["tolerance"]:
        return "Nothing is skipped, so there is nothing that skipping could cost."
    largest = max(_flat(found["bound"]))
    return (
        f"Outside of its window lies at most {_power(found['tolerance'])} of a query's attention, so that leaving "
        f"those keys out moves the output of attention by at most {largest:.2g} in any head of any layer: the "
        "tolerance times the diameter of the layer's values."
    )


def farthest_head(found: Values) -> tuple[int, int]:
    """Layer and head whose needed distance is the largest on average."""
    needed = found["heads"]["needed"]
    places = [(layer, head) for layer, row in enumerate(needed) for head in range(len(row))]
    return max(places, key=lambda place: needed[place[0]][place[1]])


def heads_table(found: Values) -> Table:
    """One row a head."""
    names = (
        "visited", "seen", "reach", "farthest", "needed", "most_needed", "mattered", "skipped", "diameter", "output"
    )  # fmt: skip
    slopes, rows = found["slopes"], []
    for layer, head in _places(found):
        bound = None if found["bound"] is None else found["bound"][layer][head]
        slope = None if slopes is None else slopes[head]
        rows.append((layer + 1, head + 1, slope, *(found["heads"][name][layer][head] for name in names), bound))
    return Table(
        ("layer", "head", "slope", "visited", "can_see", "mean_reach", "farthest_reach", "needed_mean", "needed_most",
         "mattered", "largest_skipped", "diameter_of_values", "mean_output", "bound"),
        tuple(rows),
    )  # fmt: skip


def layers_table(found: Values) -> Table:
    """The bound of each layer, beside what attention gives there."""
    rows = []
    for layer, diameters in enumerate(found["heads"]["diameter"]):
        bound = None if found["bound"] is None else max(found["bound"][layer])
        output = statistics.fmean(found["heads"]["output"][layer])
        relative = None if bound is None or not output else bound / output
        skipped = max(found["heads"]["skipped"][layer])
        rows.append((layer + 1, found["tolerance"], skipped, max(diameters), bound, output, relative))
    return Table(
        ("layer", "tolerance", "largest_skipped", "diameter_of_values", "bound", "mean_output", "relative_bound"),
        tuple(rows),
    )  # fmt: skip


def looks_table(found: Values) -> Table:
    """Where the farthest-sighted heads look farthest."""
    columns = (
        "layer",
        "head",
        "needed_mean",
        "needed_most",
        "query_at",
        "text_up_to_it",
        "key_at",
        "text_up_to_there",
    )
    rows = [
        (
            each["layer"] + 1, each["head"] + 1, round(each["needed"]), int(each["distance"]), each["query"],
            each["query_text"], each["key"], each["key_text"],
        )
        for each in found["looks"]
    ]  # fmt: skip
    return Table(columns, tuple(rows))


def by_head(found: Values) -> Chart:
    views = []
    for name, title, unit in HEADS:
        if not found["penalty"] and name not in WITHOUT_WINDOWS:
            continue
        values = found["heads"][name]
        skips = name in ("seen", "visited")  # the smaller, the more is left out
        views.append(View(title, [heat(values, unit == ":.1%", unit, reverse=skips)], grid_layout(values)))
    table = heads_table(found)
    if not found["penalty"]:
        caption = (
            "By layer and head: the distance within which 99% of a query's attention really lies, on average over "
            "the text and for the query that looks farthest, and which share of the keys could not have been left "
            "out without losing more than the tolerance."
        )
        return Chart("heads", "What each head needs", "Heads", caption, views, table, listed=table.without(*WINDOWS))
    return Chart(
        "heads",
        "What each head can see, and what it needs",
        "Heads",
        "By layer and head: what it can see, which is the share of the keys in sight that lie inside of certified "
        "windows, and how many tokens away they reach (every key outside is proved not to matter; windows are proved "
        "for 32 queries and keys at a time); the distance within which 99% of a query's attention really lies, on "
        "average over the text and for the query that looks farthest; which share of the keys that it can see could "
        "not have been left out without losing more than the tolerance; and the share that attention visits, in "
        "whole blocks of 128 keys (64 in the GPU kernels), or everything where looking for windows would not pay.",
        views,
        table,
        listed=table.without(),
    )


def by_length(found: Values) -> Chart:
    lengths = [each["length"] for each in found["by_length"]]
    views, rows = [], []
    for name, title in (("visited", "that attention visits"), ("seen", "that heads can see")):
        everything = [statistics.fmean(_flat(each[name])) for each in found["by_length"]]
        mean = _line("all heads", lengths, everything, 0, ".1%", meta={"end": "all heads"})
        mean |= {"line": {"color": GREY, "width": 4}, "marker": {"color": GREY, "size": 9, "symbol": "circle"}}
        traces = [mean]
        for place, head in enumerate(_some_heads(found, 4)):
            shares = [statistics.fmean(row[head] for row in each[name]) for each in found["by_length"]]
            label = _label(found, head)
            traces.append(_line(label, lengths, shares, place, ".1%", meta={"end": plotly_text(label)}))
        layout = {
            "xaxis": axis("length of the text in tokens", "log", lengths),
            "yaxis": axis("share of the keys in sight") | {"rangemode": "tozero", "tickformat": ".0%"},
        }
        views.append(View(f"share of keys {title}", traces, layout, _trained(found)))
    for each in found["by_length"]:
        for layer, head in _places(found):
            shares = [each[name][layer][head] for name in ("visited", "seen")]
            rows.append((layer + 1, head + 1, each["length"], *shares))
    return Chart(
        "visited",
        "Keys visited by length",
        "By length",
        "The share of the keys in sight that attention visits in the first so many tokens of the text, over all "
        "layers: of all heads together, and of a few from the steepest to the flattest penalty; and the share inside "
        "of certified windows. In short texts, and for heads of which little could be skipped, attention visits "
        "everything.",
        views,
        Table(("layer", "head", "length", "visited", "can_see"), tuple(rows)),
        axes="xy",
    )


def by_distance(found: Values) -> Chart:
    """Of all layers together first, then of each."""
    layers, edges = found["beyond"], found["distances"]
    heads = _some_heads(found, MANY)
    views, rows = [], []
    together = [[statistics.fmean(layer[head][place] for layer in layers) for place in range(len(edges))] for head in
                range(len(layers[0]))]  # fmt: skip
    for number, values in enumerate([together, *layers]):
        traces = [
            _line(
                _label(found, head), edges[1:], [value if value >= LEAST else None for value in values[head][1:]],
                place, ".2%",
            )
            for place, head in enumerate(heads)
        ]  # fmt: skip
        layout = {
            "xaxis": axis("distance from query to key in tokens", "log"),
            "yaxis": axis("share of attention beyond it", "log") | SHARES,
        }
        name = "mean of all layers" if number == 0 else f"layer {number}"
        views.append(View(name, traces, layout, _trained(found)))
    for layer, grid in enumerate(layers):
        for head, values in enumerate(grid):
            rows += [(layer + 1, head + 1, edge, value) for edge, value in zip(edges, values, strict=True)]
    return Chart(
        "distance",
        "How far attention looks",
        "Distance",
        "The share of a query's attention that lies farther away than a distance, on average over the queries that "
        "have keys so far away. A line that stays high relies on far tokens; where it falls straight down nothing "
        "far matters." + (" Distances in the shaded part were never seen in training." if _trained(found) else ""),
        views,
        Table(("layer", "head", "distance", "attention_beyond"), tuple(rows)),
        axes="xy",
    )


def by_position(found: Values) -> Chart:
    edges = found["position_edges"]
    places = [f"{low:,}" for low in edges[:-1]]
    most = [[max(values) for values in zip(*layer, strict=True)] for layer in found["by_position"]]
    mean = [[statistics.fmean(values) for values in zip(*layer, strict=True)] for layer in found["by_position"]]
    views = []
    for title, values in (("the head that needs most", most), ("mean of all heads", mean)):
        trace = heat(values, False, ":,.0f") | {"x": places}
        trace["hovertemplate"] = "layer %{y}, from position %{x} on: %{z:,.0f} tokens<extra></extra>"
        trace.pop("texttemplate", None)
        layout = grid_layout(values)
        layout["xaxis"] = axis("position of the query in the text") | {"type": "category", "nticks": 12}
        views.append(View(f"99% of attention within, tokens, {title}", [trace], layout))
    rows = [
        (layer + 1, head + 1, low, high - 1, value)
        for layer, grid in enumerate(found["by_position"])
        for head, values in enumerate(grid)
        for low, high, value in zip(edges, edges[1:], values, strict=False)
    ]
    return Chart(
        "positions",
        "Where in the text far tokens matter",
        "Places",
        "By layer and position of the query, the distance within which 99% of its attention lies: where the "
        "colour is strong, it relies on tokens that are far away.",
        views,
        Table(("layer", "head", "first_position", "last_position", "needed_mean"), tuple(rows)),
    )


def _lead(found: Values) -> Lead:
    """What was found, in sentences, the first of them large."""
    first, *others = [*summary(found), *([bound_sentence(found)] if found["penalty"] else [])]
    said = f'<p class="finding">{escaped(first)}</p>' + "".join(f"<p>{escaped(each)}</p>" for each in others)
    return Lead(f"What {found['about']['name']} sees", said, _facts(found))


def _sections(found: Values, drawn: Sequence[Chart]) -> list[Section]:
    sections = [Section(each.id, each.title, each.short, figure_html(each)) for each in drawn]
    back = "back " if found["causal"] else ""
    looks = table_html(looks_table(found), "The farthest looks") + quiet(
        "The heads that need far tokens most, on average, and for each the query that looks farthest: 99% of its "
        f"attention reaches {back}to the key that is shown. Positions count tokens from 0."
    )
    sections.append(
        Section("looks", "The farthest looks", "Looks", looks + download_html("looks", "Download as CSV"))
    )
    if not found["penalty"]:
        return sections
    bound = table_html(layers_table(found).without(), "The bound of each layer") + quiet(
        "The proof holds for whatever stands outside of the windows: other values no farther apart than the layer's "
        "own, or keys turned about their centre without getting longer, move the output by no more than the bound. "
        "Of each layer: the largest part of any query's attention that lies outside of its window, as measured; the "
        "diameter of the values, from above; the bound, which is the tolerance times that; and the mean norm of what "
        "a head gives, for scale, with the bound as a share of it. Rounding in the model's own dtype comes on top."
    )
    bound += download_html("layers", "Download as CSV")
    return [*sections, Section("bound", "What leaving keys out can cost", "Bound", bound)]


def _facts(found: Values) -> list[tuple[str, str]]:
    about, text = found["about"], found["text"]
    sizes = f"{len(found['heads']['visited'])} layers of {len(found['heads']['visited'][0])} heads"
    trained = f", trained at {about['length']:,} tokens" if about.get("length") else ""
    what = "language model" if found["causal"] else "encoder"
    return [
        ("Model", f"{what} with {found['position']} positions, {sizes}{trained}, from {about['folder']}"),
        ("Text", f"the first {found['length']:,} tokens of {text['name']}"),
        ("Computed", f"in {found['dtype']} on {found['device']}"),
        ("Made", f"by trainshort {found['trainshort']}"),
    ]


def _places(found: Values) -> list[tuple[int, int]]:
    return [(layer, head) for layer, row in enumerate(found["heads"]["visited"]) for head in range(len(row))]


def _some_heads(found: Values, limit: int) -> list[int]:
    """From the steepest slope to the flattest; without slopes, from the nearest-sighted to the farthest-sighted."""
    slopes = found["slopes"]
    if slopes is None:
        slopes = [-statistics.fmean(column) for column in zip(*found["heads"]["needed"], strict=True)]
    return few_heads(list(slopes), limit)


def _label(found: Values, head: int) -> str:
    slope = "" if found["slopes"] is None else f", slope {found['slopes'][head]:.3g}"
    return f"head {head + 1}{slope}"


def _line(name: str, x: Sequence[float], y: Sequence[float | None], place: int, unit: str, **more: Any) -> Plot:
    color = COLORS[place % len(COLORS)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plotly_text(name),
        "legendgroup": plotly_text(name),
        "x": list(x),
        "y": list(y),
        "line": {"color": color, "width": 2, "dash": DASHES[place // len(COLORS) % len(DASHES)]},
        "marker": {"color": color, "size": 5},
        "hovertemplate": f"<b>%{{y:{unit}}}</b>  {plotly_text(name)}<extra></extra>",
    } | more


def _trained(found: Values) -> tuple[int, ...]:
    length = found["about"].get("length")
    return (length,) if length else ()


def _flat(grid: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in grid for value in row]


def _power(value: float) -> str:
    """A power of two as such, for people who know these."""
    mantissa, exponent = value.hex().split("p") if value > 0 else ("", "0")
    raised = exponent.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"2{raised}" if mantissa == "0x1.0000000000000" else f"{value:g}"
