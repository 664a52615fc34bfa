"""The page: one HTML file with everything in it, which asks for nothing from anywhere.

All text that comes from runs passes through `escaped` or `json_for_page`. A content security policy lets only the two
scripts run whose hashes it names, and lets nothing be loaded: what slipped through would still do nothing.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainshort.report.charts import Chart, View
from trainshort.report.elements import (
    config_html,
    download_html,
    figure_html,
    perplexities_html,
    quiet,
    samples_html,
    switches_html,
    table_html,
)
from trainshort.report.finding import Finding
from trainshort.report.methods import Method
from trainshort.report.reading import Run, UnreadableFile
from trainshort.report.tables import Perplexities, Table
from trainshort.report.text import escaped, json_for_page, significant

ASSETS = Path(__file__).parent / "assets"
KEYS = "With the arrow keys you hear and see the values at one place after the other."
SHOWN = 4  # problems; those after them can be opened


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
    finding: Finding | None
    facts: Sequence[tuple[str, str]]
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
    """short: its name in the navigation. headed: whether its title is shown; readers of screens hear it always."""

    name: str
    title: str
    short: str
    inner: str  # HTML
    headed: bool = True


@dataclass(frozen=True)
class Lead:
    """What a page begins with. finding and notes: HTML."""

    title: str
    finding: str
    facts: Sequence[tuple[str, str]]
    notes: str = ""


def page(content: Content, plotly: str) -> str:
    """The whole HTML of a report; `plotly` is the text of plotly.js."""
    tables = {chart.id: chart.table.csv for chart in content.charts if chart.table is not None}
    tables["runs"] = content.about_runs.csv
    found = "" if content.finding is None else f'<p class="finding">{finding_html(content.finding)}</p>'
    lead = Lead(content.title, found, content.facts, _problems(content))
    return document(lead, _sections(content), content.charts, tables, plotly, switches_html(content.methods))


def finding_html(finding: Finding) -> str:
    """Methods in bold, underlined in their colours."""
    return "".join(
        escaped(part)
        if isinstance(part, str)
        else f'<strong style="text-decoration-color:{part.color}">{escaped(part.label)}</strong>'
        for part in finding.parts
    )


def document(
    lead: Lead,
    sections: Sequence[Section],
    drawn: Sequence[Chart],
    tables: Mapping[str, str],
    plotly: str,
    switches: str = "",
) -> str:
    """One HTML file. tables: CSV files that can be downloaded, by name. switches: HTML beside the navigation."""
    script = _script_text((ASSETS / "page.js").read_text(encoding="utf-8"))
    plotly = _script_text(plotly)
    shown = [
        {"name": chart.id, "views": list(map(_view_data, chart.views)), "captions": chart.captions} for chart in drawn
    ]
    hashes = " ".join(f"'sha256-{_hash(text)}'" for text in (plotly, script))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    )
    links = "".join(f'<li><a href="#{each.name}">{escaped(each.short)}</a></li>' for each in sections)
    facts = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in lead.facts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{escaped(lead.title)}</title>
<link rel="icon" href="data:,">
<style>
{(ASSETS / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header class="bar"><nav aria-label="Sections"><ul>{links}</ul></nav>{switches}</header>
<main id="content">
<div class="opening">
<h1>{escaped(lead.title)}</h1>
{lead.finding}
<dl class="facts">{facts}</dl>
{lead.notes}
<noscript><p class="problems">The charts need JavaScript; the tables below do not.</p></noscript>
</div>
{"".join(map(_section_html, sections))}
<p class="hidden" id="chart-keys">{KEYS}</p>
<p class="hidden" id="said" role="status"></p>
</main>
<script type="application/json" id="report-data">{json_for_page({"charts": shown, "tables": dict(tables)})}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def _view_data(view: View) -> dict[str, Any]:
    found: dict[str, Any] = {"traces": view.traces, "layout": view.layout, "trained": view.trained}
    if view.stretch is not None:
        found |= {"stretch": dataclasses.asdict(view.stretch), "stretched": view.is_stretched}
    return found


def _section_html(section: Section) -> str:
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">'
        f'<h2 id="{section.name}-title"{"" if section.headed else " class=hidden"}>{escaped(section.title)}</h2>'
        f"{section.inner}</section>\n"
    )


def _sections(content: Content) -> list[Section]:
    """In the order of the page; what there is nothing of has no section."""
    sections = []
    for place, chart in enumerate(content.charts):
        headed = place > 0 or chart.name != "extrapolation"  # the first one is what the finding is about
        number = chart.suffix.replace("_", " ")
        sections.append(Section(chart.id, chart.title, chart.short + number, figure_html(chart), headed))
        for listed in content.tables:
            if chart.name == "extrapolation" and chart.suffix == listed.suffix:
                sections.append(
                    Section(f"perplexities{listed.suffix}", listed.title, f"Table{number}", _listed(listed))
                )
    if samples := samples_html(content.methods):
        said = "How each model goes on with the same text (the paler part), with the same random numbers."
        sections.append(Section("samples", "Samples", "Samples", quiet(said) + samples))
    sections.append(Section("runs", "Runs, versions and configs", "Runs", _runs(content)))
    return sections


def _runs(content: Content) -> str:
    """What differs between runs as a table, what they share as a sentence, then their configs and what is missing."""
    table, same = content.about_runs.split_common("run", "method", "seed")
    inner = table_html(table.without("folder"), "Runs")
    shared = [f"{name.replace('_', ' ')} {_shown(value)}" for name, value in same.items() if name != "folder"]
    if shared:
        inner += quiet(f"{'The same for all' if len(content.runs) > 1 else 'This run'}: {', '.join(shared)}.")
    inner += download_html("runs", "Download as CSV")
    if content.with_configs:
        inner += "<h3>Configs</h3>" + "".join(config_html(run, _files(run)) for run in content.runs)
    if content.missing:
        reasons = "".join(
            f"<li><strong>{escaped(name)}.</strong> {escaped(reason)}</li>"
            for name, reason in content.missing.items()
        )
        inner += f"<details><summary>What is not in this report</summary><ul>{reasons}</ul></details>"
    return inner


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else significant(value) if isinstance(value, float) else str(value)


def _listed(listed: Listed) -> str:
    inner = perplexities_html(listed.perplexities, listed.title, f"perplexity-table{listed.suffix}")
    inner += quiet(listed.sentence) + "".join(quiet(f"– {note}") for note in listed.perplexities.notes)
    return inner + download_html(f"extrapolation{listed.suffix}", "Download all figures as CSV")


def _problems(content: Content) -> str:
    items = [escaped(each) for each in content.warnings]
    items += [f"<code>{escaped(each.path)}</code>: {escaped(each.what)}" for each in content.problems]
    if not items:
        return ""
    listed = [f"<li>{item}</li>" for item in items]
    first, rest = "".join(listed[:SHOWN]), "".join(listed[SHOWN:])
    more = f"<details><summary>and {len(items) - SHOWN} more</summary><ul>{rest}</ul></details>" if rest else ""
    return f'<div class="problems" role="note"><strong>Read this first</strong><ul>{first}</ul>{more}</div>'


def _files(run: Run) -> list[tuple[str, str]]:
    files = (("train.json", run.train), ("config.json, model", run.model), ("environment", run.environment))
    return [
        (name, json.dumps(values, indent=2, ensure_ascii=False, default=str)[:20000])
        for name, values in files
        if values
    ]


def _script_text(text: str) -> str:
    """As a browser reads it back, so that the hash is that of what it sees."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\\0")
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
