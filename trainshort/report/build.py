"""From runs to the folder of a report: report.html, figures/ and tables/, each file whole or as it was before."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trainshort
from trainshort.data.files import replacing
from trainshort.report import charts, head_charts
from trainshort.report.charts import Chart
from trainshort.report.heads import Seen, seen_by
from trainshort.report.methods import Method, methods_of
from trainshort.report.page import Content, page
from trainshort.report.reading import Found, Run, number, read_runs, whole
from trainshort.report.series import Protocols, curve, points, test_texts, tested_tokens
from trainshort.report.tables import Table, extrapolation_table, latex_table, perplexities
from trainshort.report.text import clean

PAGE = "report.html"
LARGEST_PAGE = 6_000_000  # bytes
CURVE_PLACES = (6000, 1500, 300)  # over all training curves; fewer if the page would become too large
FIGURES = (
    "extrapolation", "extrapolation_per_word", "extrapolation_bits_per_byte", "sliding", "loss_by_position",
    "training", "training_seconds", "cost_speed", "cost_memory", "kept", "kept_mean", "kept_farthest", "bias",
)  # fmt: skip
TABLES = ("extrapolation", "sliding", "loss_by_position", "training", "cost", "kept", "bias", "runs")


@dataclass(frozen=True)
class Report:
    """What was written, and what to say about it."""

    page: Path
    files: list[Path]
    runs: int
    problems: list[str]


def build_report(
    paths: Iterable[str | Path], out: str | Path, *, title: str | None = None, figures: bool = True, dots: int = 200
) -> Report:
    """Read the runs at the paths and write the report into the folder `out`.

    figures: also draw SVG and PNG files, the latter with `dots` to the inch.
    """
    paths = list(paths)
    found = read_runs(paths)
    if not found.runs:
        named = "; ".join(f"{each.path}: {each.what}" for each in found.problems[:3])
        raise ValueError(f"there is no run to report on ({named or 'no paths were given'})")
    plotly = _plotly(figures)
    content, text = _fitting(found, title, plotly)
    charts_and_tables = content_of(found, title=title)  # in files nothing is left out
    files = {f"tables/{each.name}.csv": each.table.csv.encode() for each in charts_and_tables.charts if each.table}
    files["tables/runs.csv"] = content.about_runs.csv.encode()
    if content.perplexities is not None:
        files["tables/perplexity.tex"] = latex_table(content.perplexities, content.table_sentence).encode()
    if figures:
        from trainshort.report.figures import drawn

        for chart in content.charts:
            files |= {f"figures/{name}": data for name, data in drawn(chart, dots)}
    files[PAGE] = text.encode("utf-8")
    out = Path(out)
    written = _write(out, files)
    _remove_old(out, files)
    problems = [*content.warnings, *(f"{each.path}: {each.what}" for each in content.problems)]
    return Report(out / PAGE, written, len(found.runs), problems)


def _fitting(found: Found, title: str | None, plotly: str) -> tuple[Content, str]:
    """The page with as much in it as its limit allows."""
    for places in CURVE_PLACES:
        content = content_of(found, title=title, places=places, complete=places == CURVE_PLACES[0])
        text = page(content, plotly)
        if len(text.encode("utf-8")) <= LARGEST_PAGE:
            break
    return content, text


def content_of(found: Found, *, title: str | None, places: int = CURVE_PLACES[0], complete: bool = True) -> Content:
    """Everything that the page shows, as numbers and text; if not `complete`, without what takes most room."""
    methods, protocols = methods_of(found.runs), Protocols(found.runs)
    main = protocols.main
    shown: list[Chart] = []
    missing: dict[str, str] = {}
    table = None
    sentence = ""
    if main is not None:
        how = _how(found.runs, main)
        every_figure = extrapolation_table(methods, protocols, protocols.names)
        shown.append(charts.extrapolation(methods, protocols, main, every_figure, how))
        table = perplexities(methods, protocols, main)
        sentence = (
            f"Perplexity per token over {how}, by test length; below each its ratio to the value at the training "
            "length L; the best of each length is marked."
        )
        shown += _tested_charts(found.runs, methods, protocols, main, missing, complete)
    limit = max(20, min(300, places // len(found.runs)))
    curves = [(method, each) for method in methods for run in method.runs if (each := curve(run, limit)) is not None]
    if curves:
        before_cost = next((place for place, chart in enumerate(shown) if chart.name == "cost"), len(shown))
        shown.insert(before_cost, charts.training(curves))
    else:
        missing["Training curves"] = "No run has a metrics.jsonl that could be read."
    shown = [chart for chart in shown if chart.views]
    if not any(chart.name == "extrapolation" for chart in shown):
        missing["Train short, test long"] = "No run has perplexities: trainshort evaluate RUN makes them."
        table = None
    if not any(run.samples for run in found.runs):
        missing["Samples"] = "No run has a samples.json, a list of objects with a prompt and a text."
    about = f"{len(found.runs)} {'run' if len(found.runs) == 1 else 'runs'} of {', '.join(m.label for m in methods)}"
    made = datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")
    return Content(
        title=title or "Train short, test long",
        subtitle=f"{about}. Made by trainshort {trainshort.__version__} on {made}.",
        methods=methods,
        runs=found.runs,
        problems=found.problems,
        warnings=_warnings(found.runs, methods, complete),
        charts=shown,
        perplexities=table,
        table_sentence=sentence,
        about_runs=runs_table(methods),
        missing=missing,
        with_configs=complete,
    )


def _tested_charts(
    runs: Sequence[Run],
    methods: Sequence[Method],
    protocols: Protocols,
    main: str,
    missing: dict[str, str],
    complete: bool,
) -> list[Chart]:
    shown = []
    if len(protocols.names) > 1:
        shown.append(
            charts.against_sliding(methods, protocols, extrapolation_table(methods, protocols, protocols.names))
        )
    else:
        other = "--mode sliding" if main == "nonoverlapping" else "--mode nonoverlapping"
        missing["Nonoverlapping against sliding windows"] = (
            f"All runs were tested with {main} windows only: trainshort evaluate RUN {other} adds the others."
        )
    lengths = {record["length"] for run in runs for record in run.records if protocols.of(record) == main}
    shown.append(charts.by_position(methods, protocols, main, sorted(lengths)))
    shown.append(charts.cost(methods, protocols, main, _machine(runs)))
    seen: list[Seen] = []
    for method in methods:
        found = seen_by(method, protocols, main)
        seen += found if complete else found[-1:]
    if seen:
        shown.append(head_charts.kept(seen))
        bias = head_charts.bias(seen)
        shown += [] if bias is None else [bias]
    return shown


def runs_table(methods: Sequence[Method]) -> Table:
    columns = (
        "run", "method", "trained_at", "seed", "steps", "tokens", "lr", "layers", "d_model", "heads", "seconds",
        "device", "threads", "torch", "trainshort", "folder",
    )  # fmt: skip
    rows = []
    for method in methods:
        for run in method.runs:
            steps, batch = whole(run.train.get("steps")), whole(run.train.get("batch_tokens"))
            shape = [whole(run.model.get(name)) for name in ("num_layers", "d_model", "num_heads")]
            environment = run.environment
            versions = [_text(environment.get("torch")), run.trainshort]
            tokens = steps * batch if steps is not None and batch is not None else None
            head = (run.name, method.label, run.length, run.seed, steps, tokens, number(run.train.get("lr")))
            machine = (_text(environment.get("device")), whole(environment.get("threads")))
            rows.append((*head, *shape, number(run.state.get("seconds")), *machine, *versions, run.folder))
    return Table(columns, tuple(rows))


def _text(value: object) -> str | None:
    return None if value is None else clean(str(value))


def _how(runs: Sequence[Run], protocol: str) -> str:
    """The scored text in words."""
    counts = tested_tokens(runs)
    if len(test_texts(runs)) == 1 and len(counts) == 1:
        return f"the same {counts[0]:,} tokens, each scored once, in {protocol} windows"
    return f"the tokens that each run was tested on, in {protocol} windows"


def _machine(runs: Sequence[Run]) -> str:
    """Where evaluation ran, if it was one place."""
    names = ("device", "dtype", "threads")
    found = {
        tuple(str(record.get(name)) for name in names) for run in runs for record in run.records if "device" in record
    }
    if len(found) != 1:
        return ", on different machines or settings" if found else ""
    device, dtype, threads = next(iter(found))
    return f", on {device} in {dtype}" + (f" with {threads} threads" if device == "cpu" else "")


def _warnings(runs: Sequence[Run], methods: Sequence[Method], complete: bool) -> list[str]:
    warnings = []
    if len(test_texts(runs)) > 1:
        warnings.append(
            "Not all figures are over the same tokens of the same data: compare runs only where their tests agree."
        )
    if len({run.data for run in runs if run.data is not None}) > 1:
        warnings.append("The runs were trained on different data, which may have different tokens.")
    protocols = Protocols(runs)
    counts = {
        each.seeds
        for method in methods
        for name in protocols.names
        for each in points(method, protocols, name, "perplexity")
        if each.mean is not None
    }
    if len(counts) > 1:
        warnings.append(
            "The methods have different numbers of seeds; tables and CSV files say how many each figure has."
        )
    if not complete:
        warnings.append(
            "There is more than fits into this page: configs are left out, curves are coarse, and heads are shown at "
            "the longest test length only. The files in tables/ have everything."
        )
    return warnings


def _plotly(figures: bool) -> str:
    """The text of plotly.js; both packages are looked for before any work is done."""
    try:
        from plotly.offline import get_plotlyjs

        if figures:
            import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"the report needs the package {error.name}, which is not installed: pip install plotly matplotlib"
        ) from None
    return str(get_plotlyjs())


def _write(out: Path, files: dict[str, bytes]) -> list[Path]:
    """The page comes last: once it is there, all that belongs to it is."""
    written = []
    for name, content in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_bytes(content)
        written.append(path)
    return written


def _remove_old(out: Path, files: dict[str, bytes]) -> None:
    """Files of an earlier report in the same folder that this one does not have; nothing else."""
    ours = [f"figures/{name}.{kind}" for name in FIGURES for kind in ("svg", "png")]
    ours += [f"tables/{name}.csv" for name in TABLES] + ["tables/perplexity.tex"]
    for name in ours:
        if name not in files:
            (out / name).unlink(missing_ok=True)
