"""The page: one HTML file with everything in it, which asks for nothing from anywhere.

All text that comes from runs passes through `escaped` or `json_for_page`. A content security policy lets only the two
scripts run whose hashes it names, and lets nothing be loaded: what slipped through would still do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainshort.report.charts import Chart, plotly_text
from trainshort.report.methods import Method
from trainshort.report.reading import Run, UnreadableFile
from trainshort.report.tables import Cell, Perplexities, Table
from trainshort.report.text import escaped, json_for_page, significant

ASSETS = Path(__file__).parent / "assets"
SAMPLE_CHARACTERS = 4000


@dataclass(frozen=True)
class Listed:
    """The table of one test. It stands after the chart of that suffix; sentence: what it is of."""

    perplexities: Perplexities
    title: str
    sentence: str
    suffix: str = ""


@dataclass(frozen=True)
class Content:
    """All that the page shows."""

    title: str
    subtitle: str
    methods: Sequence[Method]
    runs: Sequence[Run]
    problems: Sequence[UnreadableFile]
    warnings: Sequence[str]
    charts: Sequence[Chart]
    tables: Sequence[Listed]
    about_runs: Table
    missing: dict[str, str] = field(default_factory=dict)  # of charts that cannot be drawn: title to reason
    with_configs: bool = True


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    inner: str  # HTML


def page(content: Content, plotly: str) -> str:
    """The whole HTML of a report; `plotly` is the text of plotly.js."""
    tables = {chart.id: chart.table.csv for chart in content.charts if chart.table is not None}
    tables["runs"] = content.about_runs.csv
    header = _problems(content) + _switches(content.methods)
    return document((content.title, content.subtitle), header, _sections(content), content.charts, tables, plotly)


def document(
    heading: tuple[str, str],
    header: str,
    sections: Sequence[Section],
    drawn: Sequence[Chart],
    tables: Mapping[str, str],
    plotly: str,
) -> str:
    """One HTML file. heading: title and subtitle. header: HTML. tables: CSV files that can be downloaded, by name."""
    title, subtitle = heading
    script = _script_text((ASSETS / "page.js").read_text(encoding="utf-8"))
    plotly = _script_text(plotly)
    shown = [
        {"name": chart.id, "views": [{"traces": each.traces, "layout": each.layout} for each in chart.views]}
        for chart in drawn
    ]
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in (plotly, script))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    )
    links = "".join(f'<li><a href="#{each.name}">{escaped(each.title)}</a></li>' for each in sections)
    body = "\n".join(
        f'<section id="{each.name}" aria-labelledby="{each.name}-title">'
        f'<h2 id="{each.name}-title">{escaped(each.title)}</h2>{each.inner}</section>'
        for each in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escaped(title)}</title>
<link rel="icon" href="data:,">
<style>
{(ASSETS / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header>
<h1>{escaped(title)}</h1>
<p class="quiet">{escaped(subtitle)}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
{header}
<noscript><p class="problems">The charts need JavaScript; the tables below do not.</p></noscript>
</header>
<main id="content">
{body}
</main>
<script type="application/json" id="report-data">{json_for_page({"charts": shown, "tables": dict(tables)})}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def _sections(content: Content) -> list[Section]:
    """In the order of the page."""
    sections = []
    for chart in content.charts:
        sections.append(Section(chart.id, chart.title, figure_html(chart)))
        for listed in content.tables:
            if chart.name == "extrapolation" and chart.suffix == listed.suffix:
                sections.append(Section(f"perplexities{listed.suffix}", listed.title, _listed(listed)))
    for number, (title, reason) in enumerate(content.missing.items()):
        sections.append(Section(f"missing-{number}", title, f'<p class="quiet">{escaped(reason)}</p>'))
    told = [run for run in content.runs if run.samples]
    samples = "".join(_samples(run, is_open=run is told[0]) for run in told)
    if samples:
        sentence = "Texts that the models generated, as their samples.json holds them; the prompt is the paler part."
        sections.append(Section("samples", "Samples", f'<p class="quiet">{sentence}</p>{samples}'))
    configs = "".join(map(_config, content.runs)) if content.with_configs else ""
    about = '<p class="quiet">Every run of this report with its seed, versions and cost, from its own files.</p>'
    inner = about + table_html(content.about_runs, "Runs") + download_html("runs", "Download as CSV") + configs
    sections.append(Section("runs", "Runs, seeds, versions and configs", inner))
    return sections


def _listed(listed: Listed) -> str:
    inner = f'<p class="quiet">{escaped(listed.sentence)}</p>' + _perplexities(listed)
    inner += "".join(f'<p class="quiet">– {escaped(note)}</p>' for note in listed.perplexities.notes)
    return inner + download_html(f"extrapolation{listed.suffix}", "Download all figures as CSV")


def figure_html(chart: Chart) -> str:
    tools = ""
    if len(chart.views) > 1:
        options = "".join(
            f'<option value="{place}">{escaped(each.name)}</option>' for place, each in enumerate(chart.views)
        )
        tools += f'<label>Show <select data-chart="{chart.id}" autocomplete="off">{options}</select></label>'
    for each in chart.axes:
        tools += f'<button type="button" data-chart="{chart.id}" data-axis="{each}">logarithmic {each}</button>'
    text = ""
    if chart.table is not None:
        tools += _download_button(chart.id, "CSV")
        if chart.listed:
            text = (
                f"<details><summary>The values as a table</summary>{table_html(chart.table, chart.title)}</details>"
            )
    notes = "".join(f'<p class="quiet">{escaped(note)}</p>' for note in chart.notes)
    label = f"Chart: {chart.title}. {chart.sentence}"
    return (
        f"<figure><figcaption>{escaped(chart.sentence)}</figcaption>"
        f'<div class="tools" role="group" aria-label="{escaped(chart.title)}: what is shown">{tools}</div>'
        f'<div class="chart" id="chart-{chart.id}" role="img" aria-label="{escaped(label)}"></div>'
        f"{notes}</figure>{text}"
    )


def _perplexities(listed: Listed) -> str:
    table = listed.perplexities
    heads = "".join(f'<th scope="col">{length:,}</th>' for length in table.lengths)
    rows = []
    for method, cells in zip(table.methods, table.cells, strict=True):
        trained = "" if method.length is None or "L = " in method.label else f"<small>L = {method.length:,}</small>"
        row = f'<th scope="row">{escaped(method.label)} {trained}</th>' + "".join(map(_cell, cells))
        rows.append(f"<tr>{row}</tr>")
    return _scroll(
        listed.title,
        f'<table id="perplexity-table{listed.suffix}">'
        f'<caption class="hidden">{escaped(listed.title)}</caption>'
        f'<thead><tr><th scope="col" class="text">method</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>",
    )


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return '<td><span aria-hidden="true">–</span><span class="hidden">not tested</span></td>'
    if cell.value is None:
        return '<td><span aria-hidden="true">–</span><span class="hidden">no figure</span></td>'
    ratio = "" if cell.ratio is None else f"<small>×{cell.ratio:.3f}</small>"
    if cell.best:
        return f'<td class="best">{escaped(cell.text)}<span class="hidden"> (best)</span>{ratio}</td>'
    return f"<td>{escaped(cell.text)}{ratio}</td>"


def table_html(table: Table, title: str) -> str:
    texts = [any(isinstance(row[place], str) for row in table.rows) for place in range(len(table.columns))]
    heads = "".join(
        f'<th scope="col"{" class=text" if text else ""}>{escaped(name.replace("_", " "))}</th>'
        for name, text in zip(table.columns, texts, strict=True)
    )
    rows = "".join("<tr>" + "".join(map(_plain_cell, row)) + "</tr>" for row in table.rows)
    return _scroll(title, f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")


def _plain_cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, str):
        return f'<td class="text">{escaped(value)}</td>'
    return f"<td>{value:,}</td>" if isinstance(value, int) else f"<td>{significant(value)}</td>"


def _scroll(title: str, inner: str) -> str:
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escaped(title)}">{inner}</div>'


def download_html(name: str, label: str) -> str:
    return f'<p class="tools">{_download_button(name, label)}</p>'


def _download_button(name: str, label: str) -> str:
    return (
        f'<button type="button" data-table="{name}">{escaped(label)}<span class="hidden"> of {name}</span></button>'
    )


def _problems(content: Content) -> str:
    items = [escaped(each) for each in content.warnings]
    items += [f"<code>{escaped(each.path)}</code>: {escaped(each.what)}" for each in content.problems]
    if not items:
        return ""
    listed = "".join(f"<li>{item}</li>" for item in items)
    return f'<div class="problems" role="note"><strong>Read this first</strong><ul>{listed}</ul></div>'


def _switches(methods: Iterable[Method]) -> str:
    boxes = "".join(
        '<label><input type="checkbox" checked autocomplete="off" '
        f'data-method="{escaped(plotly_text(method.label))}">'
        f'<span class="swatch" style="background:{method.color}"></span>{escaped(method.label)}</label>'
        for method in methods
    )
    return f"<fieldset><legend>Methods in all charts</legend>{boxes}</fieldset>" if boxes else ""


def _samples(run: Run, *, is_open: bool) -> str:
    parts = []
    for sample in run.samples[:5]:
        prompt, text = str(sample.get("prompt", "")), str(sample.get("text", sample.get("completion", "")))
        rest = text[len(prompt) :] if prompt and text.startswith(prompt) else text
        parts.append(f"<pre><b>{escaped(prompt[:SAMPLE_CHARACTERS])}</b>{escaped(rest[:SAMPLE_CHARACTERS])}</pre>")
    return f"<details{' open' if is_open else ''}><summary>{escaped(run.name)}</summary>{''.join(parts)}</details>"


def _config(run: Run) -> str:
    files = (("train.json", run.train), ("config.json, model", run.model), ("environment", run.environment))
    inner = "".join(
        f"<h3>{name}</h3><pre>{escaped(json.dumps(values, indent=2, ensure_ascii=False, default=str)[:20000])}</pre>"
        for name, values in files
        if values
    )
    return f"<details><summary>{escaped(run.name)}</summary>{inner}</details>"


def _script_text(text: str) -> str:
    """As a browser reads it back, so that the hash is that of what it sees."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\\0")
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
