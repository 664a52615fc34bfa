"""The tables that commands show on the terminal, drawn by the package rich."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainshort.common.machine import in_words, is_loaded

Record = Mapping[str, Any]


def console(stderr: bool = False) -> Console:
    """Wide enough for a table where nobody says how wide: a file or a pipe has no width of its own."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = max(80, shutil.get_terminal_size().columns) if terminal or "COLUMNS" in os.environ else 118
    return Console(stderr=stderr, width=width, highlight=False)


def print_table(table: Table) -> None:
    console().print(table)


def new_table(title: str, columns: Sequence[str], caption: str | None = None) -> Table:
    """The first column on the left, figures on the right. Brackets in titles, such as names of folders, are text."""
    title, caption = escape(title), None if caption is None else escape(caption)
    table = Table(
        title=title, caption=caption, box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False
    )
    table.title_justify = table.caption_justify = "left"
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place == 0 else "right")
    return table


def number(value: float | None, digits: int = 3) -> str:
    """Small numbers with decimals, large ones without, huge ones as powers of ten."""
    if value is None:
        return "–"
    if abs(value) >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.{digits}f}" if abs(value) < 100 else f"{value:,.0f}"


def evaluation_table(title: str, records: Sequence[Record]) -> Table:
    sliding = any(record["stride"] != record["length"] for record in records)
    columns = ["length", *(["stride"] if sliding else []), "perplexity", "per word", "bits/byte", "tokens/s"]
    table = new_table(title, [*columns, "memory", "kept"], _scored(records))
    for record in records:
        head = [f"{record['length']:,}", *([f"{record['stride']:,}"] if sliding else [])]
        if "skipped" in record:
            table.add_row(*head, "–", "–", "–", "–", "–", "–")
            continue
        table.add_row(
            *head,
            number(record["perplexity"]),
            number(record["perplexity_per_word"]),
            number(record["bits_per_byte"]),
            f"{record['tokens_per_second']:,.0f}{_star([record])}",
            f"{record['peak_memory_bytes'] / 1e6:,.0f} MB",
            f"{mean_kept(record):.1%}" if "kept" in record else "–",
        )
    return table


def recall_table(title: str, records: Sequence[Record]) -> Table:
    """How often the right answer was the likeliest: a row for each task and length, a column for each depth."""
    depths = records[0]["depths"]
    table = new_table(title, ["recall", "length", *(f"at {depth}%" for depth in depths), "mean"])
    for record in sorted(records, key=lambda each: (each["task"] != "passkey", each["length"])):
        head = [record["task"], f"{record['length']:,}"]
        if "skipped" in record:
            table.add_row(*head, *["–"] * (len(depths) + 1))
            continue
        shares = [correct / record["trials"] for correct in record["correct"]]
        table.add_row(*head, *(f"{share:.0%}" for share in shares), f"{sum(shares) / len(shares):.1%}")
    first = records[0]
    notes = [
        f"right answers of {first['trials']:,} trials each; chance is right in {1 / first['choices']:.1%}",
        "depth: where in the window the answer stood, 0% is its start",
    ]
    notes += dict.fromkeys(f"–  {each['length']:,}: {each['skipped']}" for each in records if "skipped" in each)
    table.caption = "\n".join(notes)
    return table


def _scored(records: Sequence[Record]) -> str:
    done = [record for record in records if "skipped" not in record]
    notes = [f"{record['length']:,}: {record['skipped']}" for record in records if "skipped" in record]
    if done:
        record = done[0]
        of = f" of {record['data_folder']}" if record["split"] == "text" else ""
        kind = "" if record["split"] == "text" else f"{record['split']} "
        notes.insert(0, f"every length scores the same {record['scored_tokens']:,} {kind}tokens{of}, each once")
        if any("kept" in each for each in done):
            notes.insert(
                1, "kept: the part of all keys in sight that attention visits, the rest provably can't matter"
            )
    notes += _loaded(done)
    return "\n".join(notes)


def _loaded(records: Sequence[Record]) -> list[str]:
    """What a star at a speed means, if there is one."""
    shares = [record["waiting"] for record in records if is_loaded(record.get("waiting"))]
    return [f"*: measured{in_words(max(shares)).removeprefix(',')}"] if shares else []


def _star(records: Sequence[Record]) -> str:
    """Marks a speed that was measured on a loaded machine."""
    return "*" if any(is_loaded(record.get("waiting")) for record in records) else ""


def mean_kept(record: Record) -> float:
    """Of all layers and heads."""
    every = [value for layer in record["kept"] for value in layer]
    return float(sum(every) / len(every))


def comparison_tables(result: Record) -> list[Table]:
    """For each training length a row a method: perplexity at every test length, and how far it is from the first.

    Of the test that was last asked for alone: what else the runs were tested on, the report shows.
    """
    return [_comparison_table(result, test) for test in result["tests"]]


def _comparison_table(result: Record, test: Record) -> Table:
    runs = [run for run in result["runs"] if run["length"] == test["trained"]]
    methods = list(dict.fromkeys(run["position"] for run in runs))
    lengths = test["lengths"]
    table = new_table(
        f"perplexity per token, trained at {test['trained']:,}, tested at",
        ["method", *(f"{length:,}" for length in lengths), "tokens/s", "memory", "kept"],
    )
    notes: list[str] = []
    counts = {}
    for method in methods:
        same = [run for run in runs if run["position"] == method]
        counts[method] = len(same)
        table.add_row(method, *_comparison_cells(method, same, test, notes))
    last_column = f"percent: change from {lengths[0]:,}; speed, memory and keys kept at {lengths[-1]:,}"
    tested = [_tested_so(run, test, len(lengths) - 1) for run in runs]
    notes += _loaded([record for record in tested if record is not None])
    table.caption = "\n".join([*_compared(runs, test), last_column, *_seeds(counts), *dict.fromkeys(notes)])
    return table


def _comparison_cells(method: str, runs: Sequence[Record], test: Record, notes: list[str]) -> list[str]:
    """Means over the seeds of one method, where each of them was tested exactly so."""
    by_length = []
    for place, length in enumerate(test["lengths"]):
        found = [_tested_so(run, test, place) for run in runs]
        missing = [str(run["seed"]) for run, record in zip(runs, found, strict=True) if record is None]
        if missing:
            notes.append(
                f"–  {method} at {length:,}: left out, seed {', '.join(missing)} was not tested like the rest"
            )
        by_length.append([] if missing else [record for record in found if record is not None])
    base = mean_of(by_length[0], "perplexity")
    cells = []
    for place, records in enumerate(by_length):
        value = mean_of(records, "perplexity")
        change = percent(value / base - 1) if value and base and place else ""
        cells.append(f"{number(value)}\n{change}")
        notes += [f"–  {record['skipped']}" for record in records if "skipped" in record]
    last = by_length[-1]
    speed, memory = mean_of(last, "tokens_per_second"), mean_of(last, "peak_memory_bytes")
    kept = [mean_kept(record) for record in last if "kept" in record]
    cells.append("–" if speed is None else f"{speed:,.0f}{_star(last)}")
    cells.append("–" if memory is None else f"{memory / 1e6:,.0f} MB")
    cells.append(f"{sum(kept) / len(kept):.1%}" if kept else "–")
    return cells


def _tested_so(run: Record, test: Record, place: int) -> Record | None:
    """The record of that test at its length number `place`."""
    wanted = {name: test[name] for name in ("data", "split", "first_token", "end_token", "mode", "dtype")}
    wanted |= {"length": test["lengths"][place], "stride": test["strides"][place]}
    matching = (each for each in run["records"] if all(each.get(name) == value for name, value in wanted.items()))
    return next(matching, None)


def _seeds(counts: Mapping[str, int]) -> list[str]:
    if len(set(counts.values())) > 1:
        return ["means over seeds: " + ", ".join(f"{method} {count}" for method, count in counts.items())]
    count = max(counts.values())
    return [f"means of {count} seeds"] if count > 1 else []


def _compared(runs: Sequence[Record], test: Record) -> list[str]:
    training = runs[0]["training"]
    rates = {run["position"]: run["lr"] for run in runs}
    same = len(set(rates.values())) == 1
    rate = f"learning rate {runs[0]['lr']:g}" if same else ", ".join(f"{name} {lr:g}" for name, lr in rates.items())
    scored = test["end_token"] - test["first_token"]
    return [
        f"each trained on {training['tokens']:,} tokens, {rate}",
        f"every figure is over the same {scored:,} tokens, each scored once",
    ]


def percent(change: float) -> str:
    return f"{change:+.1%}" if abs(change) < 1 else f"{change:+,.0%}"


def mean_of(records: Sequence[Record], name: str) -> float | None:
    """Over seeds; None where one of them has no such figure, or there are none."""
    values = [record.get(name) for record in records]
    if not values or any(value is None for value in values):
        return None
    return float(sum(value for value in values if value is not None) / len(values))
