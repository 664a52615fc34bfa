"""From runs to the folder of a report: report.html, figures/ and tables/, each file whole or as it was before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainshort.common.extras import needed, require
from trainshort.common.files import replacing
from trainshort.report import head_charts, length_charts, loss_charts
from trainshort.report.charts import Chart
from trainshort.report.finding import facts, finding
from trainshort.report.heads import Seen, seen_by
from trainshort.report.methods import Method, methods_of
from trainshort.report.page import Content, Listed, page
from trainshort.report.reading import Found, Run, read_runs
from trainshort.report.recall_chart import recall_charts
from trainshort.report.records import number, whole
from trainshort.report.series import Protocols, curve
from trainshort.report.tables import Table, extrapolation_table, latex_table, perplexities
from trainshort.report.tested import NAMES, Tested, seeds_missing, tested
from trainshort.report.text import clean

PAGE = "report.html"
LARGEST_PAGE = 6_000_000  # bytes
CURVE_PLACES = (6000, 1500, 300)  # over all training curves; fewer if the page would become too large
FIGURES = (
    "extrapolation", "extrapolation_ratio", "extrapolation_per_word", "extrapolation_bits_per_byte", "sliding",
    "loss_by_position", "training", "training_seconds", "cost_speed", "cost_memory", "kept", "kept_mean",
    "kept_farthest", "bias", "recall_passkey", "recall_copy",
)  # fmt: skip
TABLES = ("extrapolation", "sliding", "loss_by_position", "training", "cost", "kept", "bias", "recall", "runs")


@dataclass(frozen=True)
class Report:
    """What was written, and what to say about it. finding: in one sentence, None where nothing was tested."""

    page: Path
    finding: str | None
    files: list[Path]
    runs: int
    problems: list[str]


def build_report(
    paths: Iterable[str | Path],
    out: str | Path,
    *,
    title: str | None = None,
    names: Mapping[str, str] | None = None,
    figures: bool = True,
    dots: int = 200,
) -> Report:
    """Read the runs at the paths and write the report into the folder `out`.

    names: what to call position methods that are not ours. figures: also draw SVG and PNG files, the latter with
    `dots` to the inch.
    """
    paths = list(paths)
    found = read_runs(paths)
    if not found.runs:
        named = "; ".join(f"{each.path}: {each.what}" for each in found.problems[:3])
        raise ValueError(f"there is no run to report on ({named or 'no paths were given'})")
    plotly = plotly_js(figures)
    content, text = _fitting(found, title, names, plotly)
    charts_and_tables = content_of(found, title=title, names=names)  # in files nothing is left out
    files = {f"tables/{each.id}.csv": each.table.csv.encode() for each in charts_and_tables.charts if each.table}
    files["tables/runs.csv"] = content.about_runs.csv.encode()
    for listed in content.tables:
        files[f"tables/perplexity{listed.suffix}.tex"] = latex_table(listed.perplexities, listed.sentence).encode()
    if figures:
        from trainshort.report.figures import drawn

        for chart in content.charts:
            files |= {f"figures/{name}": data for name, data in drawn(chart, dots)}
    files[PAGE] = text.encode("utf-8")
    out = Path(out)
    written = write_files(out, files)
    _remove_old(out, files)
    problems = [*content.warnings, *(f"{each.path}: {each.what}" for each in content.problems)]
    said = None if content.finding is None else content.finding.text
    return Report(out / PAGE, said, written, len(found.runs), problems)


def _fitting(found: Found, title: str | None, names: Mapping[str, str] | None, plotly: str) -> tuple[Content, str]:
    """The page with as much in it as its limit allows."""
    for places in CURVE_PLACES:
        content = content_of(found, title=title, names=names, places=places, complete=places == CURVE_PLACES[0])
        text = page(content, plotly)
        if len(text.encode("utf-8")) <= LARGEST_PAGE:
            break
    return content, text


def content_of(
    found: Found,
    *,
    title: str | None,
    names: Mapping[str, str] | None = None,
    places: int = CURVE_PLACES[0],
    complete: bool = True,
) -> Content:
    """Everything that the page shows, as numbers and text; if not `complete`, without what takes most room."""
    methods, tests = methods_of(found.runs, names), tested(found.runs)
    shown: list[Chart] = []
    missing: dict[str, str] = {}
    tables: list[Listed] = []
    for test in tests:
        drawn, listed = _of_test(test, methods, missing, complete)
        shown += drawn
        tables += [] if listed is None else [listed]
    before_cost = next((place for place, chart in enumerate(shown) if chart.name == "cost"), len(shown))
    shown[before_cost:before_cost] = recall_charts(methods)
    limit = max(20, min(120, places // len(found.runs)))
    trained_here = any(not run.about for run in found.runs)  # of others, how they were trained is not known
    curves = [(method, each) for method in methods for run in method.runs if (each := curve(run, limit)) is not None]
    if curves:
        before_cost = next((place for place, chart in enumerate(shown) if chart.name == "cost"), len(shown))
        shown.insert(before_cost, loss_charts.training(curves))
    elif trained_here:
        missing["Training curves"] = "No run has a metrics.jsonl that could be read."
    if not tables:
        missing["Train short, test long"] = "No run has perplexities: trainshort evaluate RUN makes them."
    if trained_here and not any(run.samples for run in found.runs):
        missing["Samples"] = "No run has a samples.json, a list of objects with a prompt and a text."
    return Content(
        title=title or "Train short, test long",
        finding=finding(tests[0], methods) if tests else None,
        facts=facts(found.runs, tests[0] if tests else None),
        methods=methods,
        runs=found.runs,
        problems=found.problems,
        warnings=_warnings(found.runs, methods, tests, complete),
        charts=shown,
        tables=tables,
        about_runs=runs_table(methods),
        missing=missing,
        with_configs=complete,
    )


def _of_test(
    test: Tested, methods: Sequence[Method], missing: dict[str, str], complete: bool
) -> tuple[list[Chart], Listed | None]:
    """The charts and the table of one test; what a reader may miss of the main one is put into `missing`."""
    protocols = Protocols(test.runs)
    main, here = protocols.main, test.methods(methods)
    if main is None:
        return [], None
    on = f", on {test.name}" if test.name else ""
    how = f"{test.scored}, in {main} windows"
    every_figure = _with_test(extrapolation_table(here, protocols, protocols.names), test)
    drawn = [length_charts.extrapolation(here, protocols, main, every_figure, how, test.figure)]
    if len(protocols.names) > 1:
        drawn.append(length_charts.against_sliding(here, protocols, every_figure, test.figure))
    elif test.number == 1:
        other = "--mode sliding" if main == "nonoverlapping" else "--mode nonoverlapping"
        missing["Nonoverlapping against sliding windows"] = (
            f"These tokens were scored in {main} windows only: trainshort evaluate RUN {other} {test.how_again} adds "
            "the others."
        )
    lengths = {record["length"] for run in test.runs for record in run.records if protocols.of(record) == main}
    drawn.append(loss_charts.by_position(here, protocols, main, sorted(lengths), test.figure))
    drawn.append(length_charts.cost(here, protocols, main, _machine(test.runs)))
    drawn += _heads(here, protocols, main, complete)
    drawn = [replace(chart, title=chart.title + on, suffix=test.suffix) for chart in drawn if chart.views]
    if not any(chart.name == "extrapolation" for chart in drawn):
        return drawn, None
    name = "Perplexity per token" if test.same_tokens else "Bits per byte"
    sentence = (
        f"{name} over {how}, by test length; below each its ratio to the value at the training "
        "length L; the best of each length is marked."
    )
    table = perplexities(here, protocols, main, test.figure)
    title = f"{'Perplexity' if test.same_tokens else 'Bits per byte'} by test length{on}"
    return drawn, Listed(table, title, sentence, test.suffix)


def _heads(methods: Sequence[Method], protocols: Protocols, main: str, complete: bool) -> list[Chart]:
    seen: list[Seen] = []
    for method in methods:
        found = seen_by(method, protocols, main)
        seen += found if complete else found[-1:]
    if not seen:
        return []
    bias = head_charts.bias(seen)
    return [head_charts.kept(seen), *([] if bias is None else [bias])]


def _with_test(table: Table, test: Tested) -> Table:
    """With columns that say what was tested on, so that rows of several files can be told apart."""
    return Table((*table.columns, *NAMES), tuple((*row, *test.key) for row in table.rows))


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
            rows.append((*head, *shape, _seconds(run), *machine, *versions, run.folder))
    return Table(columns, tuple(rows))


def _seconds(run: Run) -> float | int | None:
    """Of the training; whole ones where parts of a second say nothing."""
    seconds = number(run.state.get("seconds"))
    return seconds if seconds is None or seconds < 10 else round(seconds)


def _text(value: object) -> str | None:
    return None if value is None else clean(str(value))


def _machine(runs: Sequence[Run]) -> str:
    """Where evaluation ran, if it was one place."""
    names = ("device", "dtype", "threads")
    found = {
        tuple(str(record.get(name)) for name in names) for run in runs for record in run.records if "device" in record
    }
    if len(found) != 1:
        return ", on different machines or settings" if found else ""
    device, dtype, threads = next(iter(found))
    return f", on {device} in {dtype}" + (f" with {_counted(threads, 'thread')}" if device == "cpu" else "")


def _counted(count: str, what: str) -> str:
    return f"{count} {what}" if count == "1" else f"{count} {what}s"


def _warnings(runs: Sequence[Run], methods: Sequence[Method], tests: Sequence[Tested], complete: bool) -> list[str]:
    warnings = []
    if len(tests) > 1:
        names = "; ".join(each.name for each in tests)
        warnings.append(
            f"The runs were tested in {len(tests)} ways that can't be compared: {names}. Each has charts "
            "and a table of its own, and no figure is over several of them."
        )
    for test in tests:
        if missing := seeds_missing(methods, test):
            on = f" on {test.name}" if test.name else ""
            warnings.append(
                f"Not all seeds were tested{on}, and means are over those that were: {'; '.join(missing)}."
            )
        if len(dtypes := test.dtypes()) > 1:
            listed = "; ".join(f"{', '.join(names)} in {dtype}" for dtype, names in dtypes.items())
            warnings.append(f"Not all were tested in the same dtype: {listed}.")
    trained: dict[str, list[str]] = {}
    for run in runs:
        if run.data is not None:
            trained.setdefault(run.data, []).append(run.name)
    if len(trained) > 1:
        groups = "; ".join(", ".join(names) for names in trained.values())
        warnings.append(f"The runs were trained on different data, which may have different tokens: {groups}.")
    counts = {
        method.label: len(method.runs)
        for method in methods
        if any(run.records for run in method.runs) and not method.runs[0].about
    }
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{label} {count}" for label, count in counts.items())
        warnings.append(f"The methods have different numbers of seeds: {listed}.")
    if not complete:
        warnings.append(
            "There is more than fits into this page: configs are left out, curves are coarse, and heads are shown at "
            "the longest test length only. The files in tables/ have everything."
        )
    return warnings


def plotly_js(figures: bool) -> str:
    """The text of plotly.js; both packages are looked for before any work is done."""
    require(["plotly", *(["matplotlib"] if figures else [])], by="the report")
    with needed("plotly", by="the report"):
        from plotly.offline import get_plotlyjs
    return str(get_plotlyjs())


def write_files(out: Path, files: dict[str, bytes]) -> list[Path]:
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
    names = {"figures": (FIGURES, "svg|png"), "tables": ((*TABLES, "perplexity"), "csv|tex")}
    for folder, (known, kinds) in names.items():
        ours = re.compile(rf"({'|'.join(known)})(_\d+)?\.({kinds})")
        for path in (out / folder).glob("*"):
            if ours.fullmatch(path.name) and f"{folder}/{path.name}" not in files:
                path.unlink(missing_ok=True)
