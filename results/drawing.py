"""The figures of docs/reproducing.md: charts of `trainshort report` of the runs here, and speeds in its style."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from found import WIKITEXT, Found, text_of
from found import Run as Result
from plan import BY_NAME, PAPERS, SPEED_METHODS

from trainshort.report.build import content_of
from trainshort.report.charts import Chart, Plot, View, axis, line, rounded
from trainshort.report.figures import chosen, drawn
from trainshort.report.methods import COLORS, MARKERS, NAMES, PREFERRED, Method
from trainshort.report.reading import Found as Read
from trainshort.report.reading import Run, read_runs

CAPTIONS = {  # by the report's name of the figure
    "extrapolation": "{view} on {text} by test length, in nonoverlapping windows",
    "sliding": "{view} on {text} by test length, in nonoverlapping and in sliding windows",
    "loss_by_position": "loss by place in {view} tokens of {text}, nonoverlapping",
    "recall_passkey": "recall of {view}, the mean over depths and seeds; the dashed line is chance",
    "recall_copy": "recall of {view}, the mean over depths and seeds; the dashed line is chance",
    "kept": "key blocks that certified windows skip, by layer and head: {view}",
}
WAYS = {"auto": "today's kernels", "dense": "dense attention"}
SPEEDS: dict[str, tuple[str, float, Callable[[Result], float | None]]] = {  # what is shown, and in which unit
    "speed_training": ("thousand tokens a second in training", 1e3, lambda run: run.training_speed),
    "speed_evaluation": ("thousand tokens a second in evaluation", 1e3, lambda run: run.tested("tokens_per_second")),
    "speed_memory": ("GB of memory in training", 1e9, lambda run: run.training_memory),
}
STRETCHED = "scaled_"


@dataclass(frozen=True)
class Figure:
    """name: of its file. chart: with one view."""

    name: str
    chart: Chart
    caption: str

    @property
    def svg(self) -> bytes:
        return next(data for name, data in drawn(self.chart, 60) if name.endswith(".svg"))


def of_trained(found: Found, trained: int) -> list[Figure]:
    """All methods that were trained at this length."""
    runs = read_runs(run.folder for name in found.contenders for run in found.of(name, trained)).runs
    return _figures(runs, tuple(CAPTIONS), trained, "")


def of_scaled(found: Found, trained: int) -> list[Figure]:
    """Methods beside themselves, stretched for longer texts."""
    stretched = {
        str(run.folder): f"{NAMES[name]}, scaled: {way}"
        for name in found.contenders
        for way, run in found.scaled(name, trained).items()
    }
    names = [name for name in found.contenders if found.scaled(name, trained)]
    first = [run.folder for name in names for run in found.of(name, trained) if run.train["seed"] == 0]
    runs = read_runs([*first, *stretched]).runs
    for run in runs:
        run.name = stretched.get(run.folder, run.name)
    return _figures(runs, ("extrapolation", "recall_passkey", "recall_copy"), trained, STRETCHED) if stretched else []


def front(found: Found) -> Figure | None:
    """The paper's methods at the short length: for the README."""
    short = found.short or 0
    runs = read_runs(run.folder for name in PAPERS for run in found.of(name, short)).runs
    return next(iter(_figures(runs, ("extrapolation",), short, "")), None) if runs else None


def _figures(runs: list[Run], names: Iterable[str], trained: int, prefix: str) -> list[Figure]:
    for run in runs:
        run.records = [each for each in run.records if text_of(each) == WIKITEXT and each.get("whole_text")]
    charts = [chart for chart in content_of(Read(runs), title=None).charts if not chart.suffix]
    found = {name: (chart, view) for chart in charts for name, view in chosen(chart)}
    return [
        Figure(
            f"{prefix}{name}-{trained}",
            replace(found[name][0], views=[found[name][1]]),
            _caption(f"{prefix}{name}", found[name][1], trained),
        )
        for name in names
        if name in found
    ]


def _caption(name: str, view: View, trained: int) -> str:
    said = CAPTIONS[name.removeprefix(STRETCHED)].format(view=view.name, text=WIKITEXT)
    how = ", as they are and stretched for longer texts" if name.startswith(STRETCHED) else ""
    return f"{said[0].upper()}{said[1:]}; trained at {trained:,} tokens{how}; {_scale(view)}"


def _scale(view: View) -> str:
    if view.traces[0]["type"] == "heatmap":
        return "pale is none, dark is all"
    if view.stretch is not None and view.is_stretched:
        return "the scale upwards is finest at its lower end"
    return f"the scale upwards is {'logarithmic' if view.layout['yaxis']['type'] == 'log' else 'linear'}"


def of_speed(found: Found) -> list[Figure]:
    """The paper's Figure 2: by length, with dense attention and with today's kernels."""
    made = []
    for name, (title, unit, figure) in SPEEDS.items():
        traces = [_trace(found, each, way, unit, figure) for each in SPEED_METHODS["auto"] for way in WAYS]
        traces = [trace for trace in traces if trace["x"]]
        if not traces:
            continue
        lengths = sorted({length for trace in traces for length in trace["x"]})
        heights = axis(title) | {"rangemode": "tozero"}
        view = View(title, traces, {"xaxis": axis("length in tokens", "log", lengths), "yaxis": heights})
        ways = " and ".join(
            f"{style} lines are {WAYS[way]}" for way, style in (("auto", "full"), ("dense", "dashed"))
        )
        caption = f"{title[0].upper()}{title[1:]} by length, with about as many tokens a step; {ways}; {_scale(view)}"
        made.append(Figure(name, Chart(name, title, title, caption, [view]), caption))
    return made


def _trace(found: Found, name: str, way: str, unit: float, figure: Callable[[Result], float | None]) -> Plot:
    place = PREFERRED[BY_NAME[name].position]
    method = Method(NAMES[name], name, None, (), COLORS[place], MARKERS[place], "solid", strong=name == "alibi")
    known = [
        (length, value / unit)
        for length in found.speed_lengths(way)
        if (run := found.speed(name, way, length)) is not None and (value := figure(run)) is not None
    ]
    trace = line(method, [length for length, _ in known], [rounded(value) for _, value in known])
    dash = "solid" if way == "auto" else "dash"
    return trace | {"name": f"{trace['name']}, {WAYS[way]}", "line": trace["line"] | {"dash": dash}}
