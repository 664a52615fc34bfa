"""Tables: one shape for the page, for CSV and for LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainshort.report.methods import Method
from trainshort.report.series import Point, Protocols, best_at, points, ratios
from trainshort.report.text import for_spreadsheet, latex, significant, times

QUANTITIES = ("perplexity", "perplexity_per_word", "bits_per_byte")


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    @property
    def csv(self) -> str:
        """Numbers in full, nothing where there is none."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow([for_spreadsheet(each) if isinstance(each, str) else each for each in row])
        return stream.getvalue()

    def without(self, *names: str) -> Table:
        """For people: without these columns, and without those that hold nothing."""
        kept = [
            place
            for place, name in enumerate(self.columns)
            if name not in names and any(row[place] is not None for row in self.rows)
        ]
        rows = tuple(tuple(row[place] for place in kept) for row in self.rows)
        return Table(tuple(self.columns[place] for place in kept), rows)

    def split_common(self, *always: str) -> tuple[Table, dict[str, Any]]:
        """What all rows share, by column, and the table without it; columns named `always` stay."""
        same = {
            name: self.rows[0][place]
            for place, name in enumerate(self.columns)
            if self.rows and name not in always and len({row[place] for row in self.rows}) == 1
        }
        return self.without(*same), {name: value for name, value in same.items() if value is not None}


@dataclass(frozen=True)
class Cell:
    """A perplexity in the table of the page: its mean, spread over seeds and ratio, and whether it is the best."""

    value: float | None
    deviation: float | None
    ratio: float | None
    best: bool
    skipped: str | None = None

    @property
    def text(self) -> str:
        if self.value is None:
            return "–"
        spread = "" if self.deviation is None else f" ± {significant(self.deviation, like=self.value)}"
        return significant(self.value) + spread


@dataclass(frozen=True)
class Perplexities:
    """Methods down, test lengths across."""

    lengths: tuple[int, ...]
    methods: tuple[Method, ...]
    cells: tuple[tuple[Cell | None, ...], ...]

    @property
    def notes(self) -> list[str]:
        """Why there is no figure, where a test was made: each reason once, with the lengths it holds for."""
        reasons: dict[tuple[str, str], list[str]] = {}
        for method, cells in zip(self.methods, self.cells, strict=True):
            for length, cell in zip(self.lengths, cells, strict=True):
                if cell is not None and cell.value is None:
                    reasons.setdefault((method.label, cell.skipped or "no figure"), []).append(f"{length:,}")
        return [f"{label} at {', '.join(lengths)}: {reason}" for (label, reason), lengths in reasons.items()]


def perplexities(
    methods: Sequence[Method], protocols: Protocols, protocol: str, figure: str = "perplexity"
) -> Perplexities:
    """Or another figure by length."""
    by_method = [points(method, protocols, protocol, figure) for method in methods]
    tested = [(method, values) for method, values in zip(methods, by_method, strict=True) if values]
    lengths = tuple(sorted({each.length for _, values in tested for each in values}))
    best = best_at([values for _, values in tested])
    rows = []
    for method, values in tested:
        known, ratio = {each.length: each for each in values}, ratios(method, values)
        rows.append(tuple(_cell(known.get(length), ratio.get(length), best) for length in lengths))
    return Perplexities(lengths, tuple(method for method, _ in tested), tuple(rows))


def _cell(point: Point | None, ratio: float | None, best: dict[int, float]) -> Cell | None:
    if point is None:
        return None
    is_best = point.mean is not None and best.get(point.length) == point.mean
    return Cell(point.mean, point.deviation, ratio, is_best, point.skipped)


def extrapolation_table(methods: Sequence[Method], protocols: Protocols, names: Sequence[str]) -> Table:
    """One row a method, protocol and length, with every figure."""
    columns = ["method", "position", "trained_at", "windows", "tested_at"]
    for name in QUANTITIES:
        columns += [name, f"{name}_deviation"]
    rows = []
    for method in methods:
        for protocol in names:
            found = {name: points(method, protocols, protocol, name) for name in QUANTITIES}
            ratio = ratios(method, found["perplexity"])
            for place, each in enumerate(found["perplexity"]):
                row: list[Any] = [method.label, method.position, method.length, protocol, each.length]
                for name in QUANTITIES:
                    row += [found[name][place].mean, found[name][place].deviation]
                rows.append((*row, ratio[each.length], each.seeds, each.skipped))
    return Table((*columns, "ratio_to_trained_length", "seeds", "skipped"), tuple(rows))


def latex_table(table: Perplexities, caption: str) -> str:
    """For a paper, with booktabs: the best of each length in bold, ratios to the training length below."""
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{latex(caption)}}}",
        f"  \\begin{{tabular}}{{l{'r' * len(table.lengths)}}}",
        "    \\toprule",
        "    method & " + " & ".join(f"{length:,}" for length in table.lengths) + r" \\",
        "    \\midrule",
    ]
    for method, cells in zip(table.methods, table.cells, strict=True):
        lines.append(f"    {latex(method.label)} & " + " & ".join(map(_latex_cell, cells)) + r" \\")
        shown = [
            "" if cell is None or cell.ratio is None else times(cell.ratio).replace("×", "$\\times$")
            for cell in cells
        ]
        if any(shown):
            lines.append("     & " + " & ".join(shown) + r" \\")
    return "\n".join([*lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""])


def _latex_cell(cell: Cell | None) -> str:
    if cell is None or cell.value is None:
        return "--"
    text = cell.text.replace(" ± ", r" $\pm$ ")
    return f"\\textbf{{{text}}}" if cell.best else text
