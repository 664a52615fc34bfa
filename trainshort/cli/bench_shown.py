"""What `trainshort bench` prints: a line for each length, as soon as it is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainshort.common.machine import in_words, is_loaded

Record = Mapping[str, Any]
WIDTHS = (11, 7, 11, 16)  # of length, kept, ours, each of the others: 80 columns in all


def bench_heading(others: Sequence[str]) -> str:
    first, second, third, rest = WIDTHS
    return f"{'length':>{first}}{'kept':>{second}}{'trainshort':>{third}}" + "".join(
        f"{each:>{rest}}" for each in others
    )


def bench_row(record: Record) -> str:
    """Milliseconds, and how many times as fast ours is."""
    first, second, third, rest = WIDTHS
    ours = record["ms"]["trainshort"]
    shape = f"{record['batch']} x {record['length']:,}"
    row = f"{shape:>{first}}{record['kept']:>{second}.1%}{ours:>{third},.1f}"
    for name, time in record["ms"].items():
        if name != "trainshort":
            row += f"{'–' if time is None else f'{time:,.1f} {time / ours:.2f}x':>{rest}}"
    return row + ("  loaded" if is_loaded(record.get("waiting")) else "")


def bench_notes(records: Sequence[Record]) -> list[str]:
    notes = ["x: its time / trainshort's; kept: the part of all keys in sight that trainshort visits"]
    for record in records:
        notes += [f"–  {name}: {why}" for name, why in record["why"].items()]
        if is_loaded(record.get("waiting")):
            notes.append(f"{record['length']:,}: measured{in_words(record['waiting']).removeprefix(',')}")
    return list(dict.fromkeys(notes))
