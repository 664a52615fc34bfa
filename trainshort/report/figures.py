"""The same charts as SVG and PNG for a paper, drawn by matplotlib from the very numbers that the page shows."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from trainshort.report.charts import Chart, Stretch, View
from trainshort.report.text import for_matplotlib

MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "x": "X", "star": "*",
    "hexagon": "h",
}  # fmt: skip
# Of the heat maps of an inspection, by what the page calls them.
HEAD_FIGURES = {
    "share of keys that it can see": "can_see",
    "how far it can see in tokens, mean": "reach",
    "how far it can see in tokens, farthest query": "farthest",
    "99% of attention within, tokens, mean": "needed",
    "99% of attention within, tokens, farthest query": "most_needed",
    "share of the keys it can see that mattered": "mattered",
    "share of keys that attention visits": "visited",
}
MOST_INSIDE = 5  # entries of a legend; larger ones stand above the axes
WIDTH, HEIGHT = 5.0, 3.4  # inches
ROW = 0.16  # inches that a row of a legend above the axes takes, beyond the first rows
LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "svg.hashsalt": "trainshort",  # the same numbers give the same file
    "path.simplify_threshold": 0.5,
}


def drawn(chart: Chart, dots: int) -> Iterator[tuple[str, bytes]]:
    """File names and contents, as SVG and PNG, of each view that is chosen."""
    for name, view in chosen(chart):
        yield from _rendered(name + chart.suffix, view, dots)


def chosen(chart: Chart) -> list[tuple[str, View]]:
    """The views of a chart that are drawn, with the names of their files: of heat maps the first of each kind."""
    suffixes = {"by step": "", "perplexity per token": "", "scored tokens per second": "speed"}
    suffixes |= {
        "perplexity per word": "per_word",
        "ratio to the trained length": "ratio",
        "bits per byte": "bits_per_byte",
        "by seconds of training": "seconds",
    }
    suffixes |= {"peak memory in MB": "memory"}
    if chart.name == "recall":
        by_length = [view for view in chart.views if "by length" in view.name]
        return [("recall_passkey" if "passkey" in view.name else "recall_copy", view) for view in by_length]
    if chart.name == "kept":
        kinds: dict[str, View] = {}
        for view in chart.views:
            kinds.setdefault(view.name.split(",")[0].split(" ")[0], view)
        return [("kept" if kind == "share" else f"kept_{kind}", view) for kind, view in kinds.items()]
    if chart.name == "heads":
        return [(f"heads_{HEAD_FIGURES[view.name]}", view) for view in chart.views]
    if chart.name in ("loss_by_position", "bias", "visited", "distance", "positions"):
        return [(chart.name, chart.views[0])]
    found = [(suffixes.get(view.name, ""), view) for view in chart.views]
    return [(f"{chart.name}_{suffix}" if suffix else chart.name, view) for suffix, view in found]


def _rendered(name: str, view: View, dots: int) -> Iterator[tuple[str, bytes]]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that the font does not have
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if view.traces[0]["type"] == "heatmap":
            _heat(figure, axes, view)
        else:
            _lines(figure, axes, view)
        for kind in ("svg", "png"):
            stream = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(stream, format=kind, dpi=dots, metadata=metadata)
            yield f"{name}.{kind}", stream.getvalue()


def _lines(figure: Any, axes: Any, view: View) -> None:
    shown = _legend_entries(view)
    for trace, label in zip(view.traces, shown, strict=True):
        if trace.get("fill") == "toself":
            axes.fill(
                *_known(trace["x"], trace["y"]), color=trace["line"]["color"], alpha=0.18, linewidth=0, zorder=1
            )
        else:
            _line(axes, trace, label)
    _axis(axes, "x", view.layout["xaxis"])
    _axis(axes, "y", view.layout["yaxis"])
    if view.stretch is not None and view.is_stretched:
        _stretch(axes, view.stretch)
    _beyond(axes, view)
    _legend(figure, axes, view)


def _legend_entries(view: View) -> list[str | None]:
    """What the legend says of each trace: a method that is drawn in several ways is named once."""
    found, named = list[str | None](), set[str]()
    for trace in view.traces:
        name = str(trace["legendgroup"] if _way(trace) else trace["name"])
        found.append(None if not trace.get("showlegend", True) or (name in named and _way(trace)) else name)
        named.add(name)
    return found


def _way(trace: dict[str, Any]) -> str:
    """In which way a method is drawn here, where its name says more than who it is: `sliding, stride 512`."""
    group = trace.get("legendgroup", "")
    return str(trace["name"]).removeprefix(f"{group}, ") if str(trace["name"]).startswith(f"{group}, ") else ""


def _legend(figure: Any, axes: Any, view: View) -> None:
    """Inside the axes, or above them where it is large: in as many columns as fit, with room for its rows."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    ways = {way: trace["line"]["dash"] for trace in view.traces if (way := _way(trace)) and "fill" not in trace}
    for way, dash in ways.items():
        style: Any = LINES[dash]
        handles.append(Line2D([], [], color="0.35", linewidth=1.5, linestyle=style))
        labels.append(for_matplotlib(_plain(way)))
    if 0 < len(handles) <= MOST_INSIDE:
        axes.legend(handles, labels, fontsize=8)
    if len(handles) <= MOST_INSIDE:
        return
    for columns in (2, 1):
        legend = figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=7)
        if legend.get_window_extent().width <= figure.bbox.width:
            break
        if columns > 1:
            legend.remove()
    rows = -(-len(handles) // columns)
    figure.set_figheight(HEIGHT + ROW * max(0, rows - 3))


def _line(axes: Any, trace: dict[str, Any], label: str | None) -> None:
    marker, line = trace.get("marker", {}), trace.get("line", {})
    symbol = str(marker.get("symbol", "circle"))
    has_line, has_markers = "lines" in trace["mode"], "markers" in trace["mode"]
    color = line.get("color") or marker.get("color")
    width = line.get("width", 2)
    axes.plot(
        *_known(trace["x"], trace["y"]),
        color=color,
        linestyle=LINES[line.get("dash", "solid")] if has_line else "none",
        linewidth=2.4 if width > 3 else 1.5 if width >= 2 else 1.0,
        marker=MARKERS.get(symbol.removesuffix("-open"), "o") if has_markers else None,
        markersize=5 if width > 3 else 4,
        markerfacecolor="white" if symbol.endswith("-open") else color,
        label="_nolegend_" if label is None else for_matplotlib(_plain(label)),
        zorder=3 if trace.get("zorder") else 2,
    )


def _beyond(axes: Any, view: View) -> None:
    """The part beyond the training lengths, shaded, and a line at each of them."""
    low, high = axes.get_xlim()
    for length in view.trained:
        if low <= length <= high:
            axes.axvline(length, color="0.5", linestyle=":", linewidth=1, zorder=1)
    if view.trained and view.trained[-1] < max(_numbers(view, "x"), default=0):
        axes.axvspan(view.trained[-1], high, color="0.5", alpha=0.08, linewidth=0, zorder=0)
        axes.set_xlim(low, high)
        place = {"xy": (view.trained[-1], 1), "xycoords": ("data", "axes fraction"), "va": "bottom"}
        axes.annotate(" longer than trained →", **place, fontsize=7, color="0.35")


def _stretch(axes: Any, stretch: Stretch) -> None:
    import numpy

    def height(value: Any) -> Any:
        return numpy.arcsinh((numpy.asarray(value) / stretch.floor - 1) / stretch.width)

    def value(height: Any) -> Any:
        return stretch.floor * (1 + stretch.width * numpy.sinh(height))

    axes.set_yscale("function", functions=(height, value))
    axes.set_yticks(stretch.ticks, [f"{each:,g}" for each in stretch.ticks])


def _numbers(view: View, which: str) -> list[float]:
    return [each for trace in view.traces for each in trace[which] if each is not None]


def _axis(axes: Any, which: str, wanted: dict[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    getattr(axes, f"set_{which}label")(wanted["title"]["text"])
    axis = getattr(axes, f"{which}axis")
    if wanted["type"] == "log":
        getattr(axes, f"set_{which}scale")("log")
        axis.set_minor_formatter(NullFormatter())
        if "tickvals" not in wanted:
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,g}"))
    if "tickvals" in wanted:
        getattr(axes, f"set_{which}ticks")(wanted["tickvals"], _apart(wanted["tickvals"], wanted["ticktext"]))
        axis.set_minor_locator(NullLocator())
    if wanted.get("rangemode") == "tozero":
        getattr(axes, f"set_{which}lim")(0, 1.08 * axis.get_data_interval()[1])
    if "range" in wanted:
        getattr(axes, f"set_{which}lim")(*wanted["range"])


def _apart(values: Sequence[float], texts: Sequence[str]) -> list[str]:
    """Of lengths among which are powers of two, those alone: labels of the others would stand on top of them."""
    powers = [math.log2(value).is_integer() if value > 0 else False for value in values]
    return [text if power or sum(powers) < 2 else "" for text, power in zip(texts, powers, strict=True)]


def _heat(figure: Any, axes: Any, view: View) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    trace = view.traces[0]
    ends = [color for _, color in trace["colorscale"]]
    colors = LinearSegmentedColormap.from_list("page", ends[::-1] if trace["reversescale"] else ends)
    image = axes.imshow(trace["z"], aspect="auto", cmap=colors, vmin=trace.get("zmin"), vmax=trace.get("zmax"))
    for which, labels in (("x", trace["x"]), ("y", trace["y"])):
        step = max(1, len(labels) // 16)
        getattr(axes, f"set_{which}ticks")(range(0, len(labels), step), labels[::step])
        getattr(axes, f"set_{which}label")(view.layout[f"{which}axis"]["title"]["text"])
    axes.grid(visible=False)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label(for_matplotlib(view.name))


def _known(x: Sequence[Any], y: Sequence[Any]) -> tuple[list[float], list[float]]:
    nothing = float("nan")
    return [nothing if each is None else each for each in x], [nothing if each is None else each for each in y]


def _plain(text: str) -> str:
    """A name as it was before plotly's escapes."""
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
