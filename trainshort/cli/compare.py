"""Position methods side by side: train each, test each at lengths beyond its training, print the table.

Methods x training lengths x seeds, each run in its own folder. What is done already is not done again, so an
interrupted comparison goes on with the same command. Nothing differs between methods but, if --lrs says so, the
learning rate. Without --data it uses the source of Python's standard library, which is there on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from trainshort.cli.stopping import on_stop
from trainshort.experiments.config import CompareConfig
from trainshort.experiments.recipes import RECIPES

NEEDS = ("matplotlib", "plotly", "rich")
EXAMPLES = """
  trainshort compare                                            minutes on two cores, no files needed
  trainshort compare --recipe demo                              what `make demo` runs
  trainshort compare --data data --positions alibi rotary t5 sinusoidal --length 256 --steps 5000
  trainshort compare --data data --positions alibi alibi:biased_heads=6 fox:gate_bias=5,rotary=true
  trainshort compare --data data --import shape.py --positions shape alibi    a method of your own
  trainshort compare --data data --recipe figure1 --model small-124m      the paper's Figure 1
  trainshort compare --data data --positions alibi sinusoidal --length 128 256 --seeds 0 1 2
"""


@dataclass(frozen=True, kw_only=True)
class Flags(CompareConfig):
    """A comparison, or a recipe of one with some fields given instead of its own."""

    recipe: str | None = field(
        default=None,
        metadata={
            "help": "a whole comparison by name, which other flags change; --model is its size",
            "choices": tuple(RECIPES),
        },
    )

    @classmethod
    def from_flags(cls, recipe: str | None = None, **given: Any) -> CompareConfig:
        if recipe is None:
            return CompareConfig(**given)
        size = {"model": given["model"]} if "model" in given else {}
        return replace(RECIPES[recipe](**size), **given)


def run(config: CompareConfig) -> None:
    from trainshort.cli.report import labels
    from trainshort.cli.shown import comparison_tables, print_table
    from trainshort.common.progress import waiting
    from trainshort.experiments.compare import NAME, compare
    from trainshort.report.build import build_report

    result = compare(config)
    for table in comparison_tables(result):
        print_table(table)
    print(f"runs and {NAME} are in {config.out}", flush=True)
    made = f"stopped; all runs are done: trainshort report {config.out} --out {config.out}/report makes the report"
    with on_stop(lambda: made), waiting("drawing the report"):
        report = build_report([config.out], f"{config.out}/report", names=labels())
    if report.finding is not None:
        print(f"\n{report.finding}")
    print(f"the report is {report.page}")
