"""What each head of a model can provably see of a text, and how much of that mattered.

For any model here, a run or a public one, language model or encoder: the windows of keys that attention visits (every
key outside is proved not to matter), the distance within which 99% of the attention really lies, the heads and places
that rely on far tokens, and the share of keys visited by length. Prints a table and writes inspection.html, with
figures, tables and inspection.json beside it. The model's own folder is only read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trainshort.cli.folders import check_one_model
from trainshort.cli.stopping import on_stop
from trainshort.evaluation.inspect_config import InspectConfig

EXAMPLES = """
  trainshort inspect runs/alibi-256                           on the beginning of the Python library's source
  trainshort inspect bloom-560m --text book.txt --dtype bfloat16
  trainshort inspect bloom-560m --text book.txt --tokens 16384 --lengths 1024 4096 16384 --device cuda
  trainshort inspect runs/alibi-256 --tolerance 0.001         how far windows would shrink
"""
FOLDER = "inspections"
MOST_ROWS = 64  # heads that are listed one by one unless asked for


@dataclass(frozen=True, kw_only=True)
class Flags(InspectConfig):
    """What to look at, and where to write."""

    folder: str = field(metadata={"help": "a run, or the folder of a public model", "positional": True})
    text: str | None = field(
        default=None,
        metadata={
            "help": "the text file to look at (default: the beginning of the Python library's source)",
            "metavar": "FILE",
        },
    )
    out: str | None = field(default=None, metadata={"help": "the folder to write to (default: inspections/NAME)"})
    heads: bool | None = field(
        default=None, metadata={"help": f"list every head (default: where there are at most {MOST_ROWS})"}
    )
    page: bool = field(
        default=True,
        metadata={
            "help": "draw the page and print tables; without it inspection.json alone is written, and none of the "
            "packages for pages and tables is needed"
        },
    )
    figures: bool = field(default=True, metadata={"help": "draw SVG and PNG files as well"})


def needs(flags: Flags) -> tuple[str, ...]:
    """Packages that an extra brings."""
    return ("matplotlib", "plotly", "rich") if flags.page else ()


def run(flags: Flags) -> None:
    from trainshort.evaluation.about import check_place
    from trainshort.evaluation.inspect_config import NAME
    from trainshort.evaluation.inspected import inspect_folder

    check_one_model(flags.folder)
    out = Path(FOLDER) / Path(flags.folder).resolve().name if flags.out is None else Path(flags.out)
    check_place(out, NAME)
    config = InspectConfig(**{each.name: getattr(flags, each.name) for each in fields(InspectConfig)})
    with on_stop(lambda: "stopped; nothing was written"), _progress() as on_layer:
        found = inspect_folder(flags.folder, flags.text, config, on_layer=on_layer)
    from trainshort.common.files import write_json

    if flags.page:
        _show(found, flags.heads)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / NAME, found)
    if not flags.page:
        print(f"{out / NAME} holds what was found")
        return
    from trainshort.common.progress import waiting
    from trainshort.report.inspected import build_inspection

    with waiting("drawing the page"):
        page = build_inspection(found, out, figures=flags.figures)
    print(f"{page} shows it; {NAME}, tables and figures are beside it")


def _show(found: dict[str, Any], heads: bool | None) -> None:
    from trainshort.cli.inspect_shown import heads_table, layers_table, lengths_table
    from trainshort.cli.shown import console
    from trainshort.report.inspected import bound_sentence, summary

    count = sum(len(row) for row in found["heads"]["visited"])
    every = count <= MOST_ROWS if heads is None else heads
    screen = console()
    screen.print(heads_table(found) if every else layers_table(found))
    screen.print(lengths_table(found))
    for line in [*summary(found), bound_sentence(found)]:
        screen.print(line, markup=False)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """Yields what is to be told of each layer: of which length, how many are done, of how many."""
    from trainshort.common.progress import Lines, can_draw_bars

    if not can_draw_bars():
        lines = Lines()

        def say(length: int, done: int, layers: int) -> None:
            if lines.due():
                print(f"{length:,} tokens: {done} of {layers} layers", file=sys.stderr, flush=True)

        yield say
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from trainshort.cli.shown import console

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total} layers"))
    with Progress(*columns, TimeRemainingColumn(compact=True), console=console(stderr=True), transient=True) as bar:
        tasks: dict[int, Any] = {}

        def on_layer(length: int, done: int, layers: int) -> None:
            if length not in tasks:
                tasks[length] = bar.add_task(f"{length:,} tokens", total=layers)
            bar.update(tasks[length], completed=done)

        yield on_layer
