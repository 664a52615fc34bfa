"""Pieces of HTML that pages are made of: figures with their controls, tables, downloads, texts side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trainshort.report.charts import Chart, plotly_text
from trainshort.report.methods import Method
from trainshort.report.reading import Run
from trainshort.report.tables import Cell, Perplexities, Table
from trainshort.report.text import escaped, significant, times

SAMPLE_CHARACTERS = 6000
FEW_VIEWS = 4  # as many fit side by side; more are a list to choose from
DASHES = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}
SYMBOLS = {
    "circle": "M9 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "square": "M9.5 2.5h7v7h-7z",
    "diamond": "M13 1l5 5-5 5-5-5z",
    "triangle-up": "M13 1.5l4.6 8.5h-9.2z",
    "cross": "M11.5 1.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "x": "M10 1.5l3 3 3-3 1.5 1.5-3 3 3 3-1.5 1.5-3-3-3 3L8.5 9l3-3-3-3z",
    "star": "M13 .5l1.6 3.7 4 .4-3 2.6.9 3.9-3.5-2.1-3.5 2.1.9-3.9-3-2.6 4-.4z",
    "hexagon": "M9.5 1.8h7L20 6l-3.5 4.200h-7L6 6z",
}


def quiet(text: str) -> str:
    return f'<p class="quiet">{escaped(text)}</p>'


def figure_html(chart: Chart) -> str:
    """The controls, the chart, and below it what it shows; what was found stands first."""
    lead = f'<p class="lead">{escaped(chart.lead)}</p>' if chart.lead else ""
    notes = "".join(map(quiet, chart.notes))
    label = f"Chart: {chart.title}. {chart.sentence}"
    values = ""
    if chart.listed is not None:
        table = table_html(chart.listed, f"values of {chart.title}")
        values = f"<details><summary>The values as a table</summary>{table}</details>"
    return (
        f'{lead}<figure><div class="tools" role="group" aria-label="{escaped(chart.title)}: what is shown">'
        f'{_views(chart)}<span class="controls">{_scales(chart)}{_buttons(chart)}</span></div>'
        f'<div class="chart" id="chart-{chart.id}" role="img" tabindex="0" aria-label="{escaped(label)}" '
        f'aria-describedby="chart-keys"></div>'
        f"<figcaption>{escaped(chart.sentence)}</figcaption>{notes}</figure>{values}"
    )


def _views(chart: Chart) -> str:
    if len(chart.views) < 2:
        return ""
    if len(chart.views) > FEW_VIEWS:
        options = "".join(
            f'<option value="{place}">{escaped(each.name)}</option>' for place, each in enumerate(chart.views)
        )
        return f'<label>Show <select data-chart="{chart.id}" data-views autocomplete="off">{options}</select></label>'
    choices = "".join(
        f'<label><input type="radio" name="view-{chart.id}" value="{place}" data-chart="{chart.id}" data-views '
        f'autocomplete="off"{" checked" if place == 0 else ""}><span>{escaped(each.name)}</span></label>'
        for place, each in enumerate(chart.views)
    )
    return f'<fieldset class="choice"><legend class="hidden">Show</legend>{choices}</fieldset>'


def _scales(chart: Chart) -> str:
    found = ""
    if "y" in chart.axes:
        names = {"linear": "linear scale", "log": "log scale"}
        if any(view.stretch is not None for view in chart.views):
            names["stretched"] = "stretched scale"
        options = "".join(f'<option value="{name}">{text}</option>' for name, text in names.items())
        found = (
            f'<label><span class="hidden">Scale of {escaped(chart.title)}</span>'
            f'<select data-chart="{chart.id}" data-scale autocomplete="off">{options}</select></label>'
        )
    if "x" in chart.axes:
        found += f'<button type="button" data-chart="{chart.id}" data-across>log x</button>'
    return found


def _buttons(chart: Chart) -> str:
    of = f'<span class="hidden"> of {escaped(chart.title)}</span>'
    found = f'<button type="button" data-reset="{chart.id}" hidden>Whole chart{of}</button>'
    found += f'<button type="button" data-image="{chart.id}">PNG{of}</button>'
    return found + ("" if chart.table is None else _download_button(chart.id, "CSV"))


def table_html(table: Table, title: str) -> str:
    texts = [any(_is_text(row[place]) for row in table.rows) for place in range(len(table.columns))]
    heads = "".join(
        f'<th scope="col"{" class=text" if text else ""}>{escaped(name.replace("_", " "))}</th>'
        for name, text in zip(table.columns, texts, strict=True)
    )
    rows = "".join("<tr>" + "".join(map(_plain_cell, row)) + "</tr>" for row in table.rows)
    return scrolling(title, f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")


def _is_text(value: Any) -> bool:
    """Shares in percent are figures, and stand on the right."""
    return isinstance(value, str) and not value.endswith("%")


def _plain_cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, str):
        return f"<td{' class=text' if _is_text(value) else ''}>{escaped(value)}</td>"
    return f"<td>{value:,}</td>" if isinstance(value, int) else f"<td>{significant(value)}</td>"


def perplexities_html(table: Perplexities, title: str, name: str) -> str:
    """Methods down, lengths across; those beyond the training length are shaded as in the chart."""
    trained = {method.length for method in table.methods}
    common = next(iter(trained)) if len(trained) == 1 else None
    heads = "".join(_length_head(length, common) for length in table.lengths)
    rows = []
    for method, cells in zip(table.methods, table.cells, strict=True):
        length = (
            ""
            if method.length is None or common or "L = " in method.label
            else f"<small>L = {method.length:,}</small>"
        )
        row = f'<th scope="row">{_mark(method)}{escaped(method.label)} {length}</th>' + "".join(map(_cell, cells))
        rows.append(f"<tr{' class=strong' if method.strong else ''}>{row}</tr>")
    return scrolling(
        title,
        f'<table id="{name}"><caption class="hidden">{escaped(title)}</caption>'
        f'<thead><tr><th scope="col" class="text">method</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>",
    )


def _length_head(length: int, trained: int | None) -> str:
    if not trained:
        return f'<th scope="col">{length:,}</th>'
    factor = length / trained
    shown = "L" if factor == 1 else f"{factor:,.4g} L"
    beyond = ' class="beyond"' if length > trained else ""
    return f'<th scope="col"{beyond}>{length:,}<small>{shown}</small></th>'


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return '<td><span aria-hidden="true">–</span><span class="hidden">not tested</span></td>'
    if cell.value is None:
        return '<td><span aria-hidden="true">–</span><span class="hidden">no figure</span></td>'
    ratio = "" if cell.ratio is None else f"<small>{times(cell.ratio)}</small>"
    if cell.best:
        return f'<td class="best">{escaped(cell.text)}<span class="hidden"> (best)</span>{ratio}</td>'
    return f"<td>{escaped(cell.text)}{ratio}</td>"


def scrolling(title: str, inner: str) -> str:
    """A box that says so where it is too narrow for what it holds."""
    label = escaped(f"Table: {title}")
    return (
        f'<div class="box"><div class="scroll" role="region" tabindex="0" aria-label="{label}">{inner}</div>'
        '<p class="more" aria-hidden="true"></p></div>'
    )


def download_html(name: str, label: str) -> str:
    return f'<p class="tools">{_download_button(name, label)}</p>'


def _download_button(name: str, label: str) -> str:
    return (
        f'<button type="button" data-table="{name}">{escaped(label)}<span class="hidden"> of {name}</span></button>'
    )


def switches_html(methods: Sequence[Method]) -> str:
    """The legend of all charts, which also switches methods on and off."""
    if len(methods) < 2:
        return ""
    boxes = "".join(
        '<label><input type="checkbox" checked autocomplete="off" '
        f'data-method="{escaped(plotly_text(method.label))}">{_mark(method)}'
        f"<span>{escaped(method.label)}</span></label>"
        for method in methods
    )
    return f'<fieldset class="legend"><legend class="hidden">Methods in all charts</legend>{boxes}</fieldset>'


def _mark(method: Method) -> str:
    """The line and marker of a method, as charts draw them."""
    width = 4 if method.strong else 2.5
    return (
        f'<svg class="mark" viewBox="0 0 26 12" aria-hidden="true"><path d="M0 6h26" stroke="{method.color}" '
        f'stroke-width="{width}" stroke-dasharray="{DASHES[method.dash]}"/>'
        f'<path d="{SYMBOLS[method.marker]}" fill="{method.color}"/></svg>'
    )


def samples_html(methods: Iterable[Method]) -> str:
    """What each model wrote, side by side; a run of each method, with the place where training windows ended."""
    texts = []
    for method in methods:
        run = next((each for each in method.runs if each.samples), None)
        if run is not None:
            written = "".join(f"<pre>{_sample(sample, method)}</pre>" for sample in run.samples[:3])
            texts.append(f"<article><h3>{_mark(method)}{escaped(method.label)}</h3>{written}</article>")
    return f'<div class="samples">{"".join(texts)}</div>' if texts else ""


def _sample(sample: dict[str, Any], method: Method) -> str:
    prompt, text = str(sample.get("prompt", "")), str(sample.get("text", sample.get("completion", "")))
    rest = text[len(prompt) :] if prompt and text.startswith(prompt) else text
    written = escaped(rest[:SAMPLE_CHARACTERS])
    inside = sample.get("within_trained_length")
    if isinstance(inside, int) and 0 <= inside < len(rest[:SAMPLE_CHARACTERS]):
        length = "" if method.length is None else f"{method.length:,} tokens: "
        mark = f'<span class="end"> {length}longer than trained from here </span>'
        written = escaped(rest[:inside]) + mark + escaped(rest[inside:SAMPLE_CHARACTERS])
    return f"<b>{escaped(prompt[:SAMPLE_CHARACTERS])}</b>{written}"


def config_html(run: Run, files: Sequence[tuple[str, str]]) -> str:
    inner = "".join(f"<h3>{name}</h3><pre>{escaped(text)}</pre>" for name, text in files)
    return f"<details><summary>{escaped(run.name)}</summary>{inner}</details>"
