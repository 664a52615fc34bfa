"""The same charts as SVG and PNG for a paper, drawn by matplotlib from the very numbers that the page shows."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from trainshort.report.charts import Chart, View
from trainshort.report.text import for_matplotlib

MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "x": "X", "star": "*",
    "hexagon": "h",
}  # fmt: skip
# Of the chart of an inspection.
HEAD_FIGURES = ("can_see", "reach", "farthest", "needed", "most_needed", "mattered", "visited")
MOST_INSIDE = 5  # entries of a legend; larger ones stand above the axes
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
    """File names and contents: each view of the chart as SVG and PNG, but of heat maps the first of each kind."""
    for name, view in _chosen(chart):
        yield from _rendered(name + chart.suffix, view, dots)


def _chosen(chart: Chart) -> list[tuple[str, View]]:
    suffixes = {"by step": "", "perplexity per token": "", "scored tokens per second": "speed"}
    suffixes |= {
        "perplexity per word": "per_word",
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
        return [("kept" if kind == "fraction" else f"kept_{kind}", view) for kind, view in kinds.items()]
    if chart.name == "heads":
        return [(f"heads_{name}", view) for name, view in zip(HEAD_FIGURES, chart.views, strict=True)]
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
        figure = Figure(figsize=(5.0, 3.4), layout="constrained")
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
    for trace in view.traces:
        marker = trace.get("marker", {})
        symbol = str(marker.get("symbol", "circle"))
        has_line, has_markers = "lines" in trace["mode"], "markers" in trace["mode"]
        line = trace.get("line", {})
        color = line.get("color") or marker.get("color")
        shown = trace.get("showlegend", True)
        style = {
            "color": color,
            "linestyle": LINES[line.get("dash", "solid")] if has_line else "none",
            "linewidth": 1.5 if line.get("width", 2) >= 2 else 1.0,
            "marker": MARKERS.get(symbol.removesuffix("-open"), "o") if has_markers else None,
            "markersize": 4,
            "markerfacecolor": "white" if symbol.endswith("-open") else color,
            "label": for_matplotlib(_plain(trace["name"])) if shown else "_nolegend_",
        }
        x, y = _known(trace["x"], trace["y"])
        error = trace.get("error_y")
        if error is not None:
            axes.errorbar(x, y, yerr=error["array"], capsize=2, elinewidth=1, **style)
        else:
            axes.plot(x, y, **style)
    for shape in view.layout.get("shapes", []):
        axes.axvline(shape["x0"], color="0.5", linestyle=":", linewidth=1)
    _axis(axes, "x", view.layout["xaxis"])
    _axis(axes, "y", view.layout["yaxis"])
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > MOST_INSIDE:
        figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=7)
    elif handles:
        axes.legend(fontsize=8)


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
        getattr(axes, f"set_{which}ticks")(wanted["tickvals"], wanted["ticktext"])
        axis.set_minor_locator(NullLocator())
    if wanted.get("rangemode") == "tozero":
        getattr(axes, f"set_{which}lim")(0, 1.08 * axis.get_data_interval()[1])
    if "range" in wanted:
        getattr(axes, f"set_{which}lim")(*wanted["range"])


def _heat(figure: Any, axes: Any, view: View) -> None:
    trace = view.traces[0]
    image = axes.imshow(trace["z"], aspect="auto", cmap="viridis", vmin=trace.get("zmin"), vmax=trace.get("zmax"))
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
