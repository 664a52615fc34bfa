"""One page with everything that runs have left: the figure, the table, costs, heads, curves, samples and configs.

Reads files only, so it can run anywhere: what is missing or damaged is named in the page, and the rest is shown.
Writes report.html, which needs no network, figures/ as SVG and PNG, and tables/ as CSV and LaTeX.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from trainshort.cli.stopping import on_stop

EXAMPLES = """
  trainshort report runs/demo                                 what compare left there
  trainshort report runs/* --out report
  trainshort report runs/own --import shape.py                its class says what the method is called
  trainshort report runs/alibi-256 runs/rotary-256 --title "Two methods" --dots 300
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to report on, and where to."""

    runs: tuple[str, ...] = field(
        metadata={"help": "folders of runs, folders of such folders, or a comparison.json", "positional": True}
    )
    out: str = field(default="report", metadata={"help": "the folder to write to"})
    title: str | None = field(default=None, metadata={"help": "of the page (default: Train short, test long)"})
    figures: bool = field(default=True, metadata={"help": "draw SVG and PNG files as well"})
    dots: int = field(default=200, metadata={"help": "to the inch, in PNG files"})

    def __post_init__(self) -> None:
        if not 50 <= self.dots <= 1200:
            raise ValueError(f"dots must lie between 50 and 1200, got {self.dots}")


def labels() -> dict[str, str]:
    """What imported position methods want to be called. Reports need no torch: without imports it is not loaded."""
    table = sys.modules.get("trainshort.positions.table")
    methods = {} if table is None else table.POSITIONS
    return {name: method.label for name, method in methods.items() if method.label is not None}


def run(flags: Flags) -> None:
    from trainshort.common.progress import waiting
    from trainshort.report.build import PAGE, build_report

    def left() -> str:
        page = Path(flags.out) / PAGE
        kept = f"{page} is as it was before" if page.exists() else "there is no page yet"
        return f"stopped; {kept}: the same command makes it again from the files of the runs"

    with on_stop(left), waiting("reading the runs and drawing figures"):
        report = build_report(
            flags.runs, flags.out, title=flags.title, names=labels(), figures=flags.figures, dots=flags.dots
        )
    for problem in report.problems:
        print(problem, file=sys.stderr)
    runs = f"{report.runs} run" + ("" if report.runs == 1 else "s")
    print(f"{report.page}: {runs}, {len(report.files) - 1} figures and tables beside it")
