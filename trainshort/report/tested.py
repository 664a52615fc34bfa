"""What was tested on what: figures over different tokens, data or dtypes never stand in one table.

A record belongs to one `Tested`: the same tokens of the same split of the same data, in the same dtype. Each is shown
on its own, with the runs that have records of it. A text that was scored to its end is one test for all tokenizers,
in whatever dtype each model has: it is compared by bytes and words, where tokens differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainshort.report.methods import Method
from trainshort.report.reading import Run
from trainshort.report.records import Values
from trainshort.report.text import clean

Key = tuple[Any, ...]
NAMES = ("data", "split", "first_token", "end_token", "dtype")


@dataclass(frozen=True)
class Tested:
    """number: from 1, the first is the main one. name: what to call it in titles; empty where it is the only one."""

    key: Key
    number: int
    name: str
    runs: tuple[Run, ...]  # each with its records of this test alone

    @property
    def is_text(self) -> bool:
        """Whether it is a whole text, of which models may have made different tokens."""
        return self.key[2] is None

    @property
    def same_tokens(self) -> bool:
        """Whether figures per token can be compared."""
        return not self.is_text or len({each.get("tokenizer") for run in self.runs for each in run.records}) < 2

    @property
    def figure(self) -> str:
        """What models are compared by."""
        return "perplexity" if self.same_tokens else "bits_per_byte"

    @property
    def tokens(self) -> int:
        return int(self.key[3]) - int(self.key[2])

    @property
    def folder(self) -> str:
        """Where the data lay."""
        return _folder(self.key, self.runs)

    @property
    def scored(self) -> str:
        """What every figure is over."""
        of = f" of {self.name}" if self.name else ""
        if not self.is_text:
            return f"the same {self.tokens:,} tokens{of}, each scored once"
        return f"the same text{of or f', {self.folder}'}, each token but the first scored once"

    @property
    def how_again(self) -> str:
        """The flags of evaluate that ask for the same test."""
        return f"--text {self.folder}" if self.is_text else f"--tokens {self.tokens}"

    def dtypes(self) -> dict[str, list[str]]:
        """The names of runs by the dtype that they were tested in."""
        found: dict[str, list[str]] = {}
        for run in self.runs:
            for dtype in dict.fromkeys(str(record["dtype"]) for record in run.records):
                found.setdefault(dtype, []).append(run.name)
        return found

    @property
    def suffix(self) -> str:
        """Of the names of files and elements."""
        return "" if self.number == 1 else f"_{self.number}"

    def methods(self, methods: Sequence[Method]) -> list[Method]:
        """The same methods, colours and markers, with the runs that have records here."""
        mine = {run.folder: run for run in self.runs}
        found = [
            replace(each, runs=tuple(mine[run.folder] for run in each.runs if run.folder in mine)) for each in methods
        ]
        return [each for each in found if each.runs]


def tested(runs: Iterable[Run]) -> list[Tested]:
    """Every test that was made; first the one that most runs have, if need be on the data they were trained on."""
    runs = list(runs)
    several = _several_dtypes(runs)
    by_key: dict[Key, list[Run]] = {}
    for run in runs:
        keys = [_without_dtype(key_of(record), several) for record in run.records]
        for key in dict.fromkeys(keys):
            here = [record for record, its_key in zip(run.records, keys, strict=True) if its_key == key]
            by_key.setdefault(key, []).append(replace(run, records=here))

    def weight(key: Key) -> tuple[int, int, int]:
        found = by_key[key]
        return (
            -len(found),
            -sum(run.data is not None and run.data == key[0] for run in found),
            -sum(len(run.records) for run in found),
        )

    keys = sorted(by_key, key=weight)
    names = _names(keys, by_key)
    return [
        Tested(key, number, name, tuple(by_key[key]))
        for number, (key, name) in enumerate(zip(keys, names, strict=True), 1)
    ]


def key_of(record: Values) -> Key:
    if record.get("whole_text") is True:
        return record["data"], record["split"], None, None, record["dtype"]
    return tuple(record[name] for name in NAMES)


def _several_dtypes(runs: Iterable[Run]) -> set[str]:
    """The texts that a single run was tested on in more than one dtype: those are tests of their own."""
    found: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        for data, _, first, _, dtype in map(key_of, run.records):
            if first is None:
                found.setdefault((run.folder, data), set()).add(dtype)
    return {data for (_, data), dtypes in found.items() if len(dtypes) > 1}


def _without_dtype(key: Key, several: set[str]) -> Key:
    return key if key[2] is not None or key[0] in several else (*key[:4], None)


def _names(keys: Sequence[Key], by_key: dict[Key, list[Run]]) -> list[str]:
    """The folder of the data, then the split, tokens and dtype where these differ; nothing if there is one test."""
    if len(keys) < 2:
        return ["" for _ in keys]
    folders = [_folder(key, by_key[key]) for key in keys]
    several = Counter(dict(zip(keys, folders, strict=True)).values())
    names = []
    for key, folder in zip(keys, folders, strict=True):
        same = [other for other, name in zip(keys, folders, strict=True) if name == folder]
        name = folder
        if several[folder] > 1 and len({other[0] for other in same}) > 1:
            name += f" ({str(key[0])[:8]})"
        is_split = key[1] != "text" and (len({other[1] for other in same}) > 1 or key[1] != "validation")
        parts = [f"{key[1]} split"] if is_split else []
        if len({other[2:4] for other in same}) > 1 and key[2] is not None:
            parts.append(f"tokens {key[2]:,} to {key[3] - 1:,}")
        if len({other[4] for other in same}) > 1 and key[4] is not None:
            parts.append(str(key[4]))
        names.append(clean(", ".join([name, *parts])))
    return names


def _folder(key: Key, runs: Sequence[Run]) -> str:
    """Where the data lay: as records say, else as runs do that were trained on them."""
    for run in runs:
        for record in run.records:
            if isinstance(record.get("data_folder"), str):
                return str(record["data_folder"])
    for run in runs:
        if run.data == key[0] and isinstance(run.train.get("data"), str):
            return str(run.train["data"])
    return f"data {str(key[0])[:8]}"


def seeds_missing(methods: Sequence[Method], here: Tested) -> list[str]:
    """`ALiBi at 64, 128: 1 of 3 seeds` for each method that not all runs were tested with in this way."""
    found = []
    for method in methods:
        mine = {run.folder: run for run in here.runs}
        if not any(run.folder in mine for run in method.runs):
            continue
        counts = Counter(
            (record["mode"], record["length"], record["stride"])
            for run in method.runs
            if run.folder in mine
            for record in mine[run.folder].records
        )
        by_count: dict[tuple[str, int], list[str]] = {}
        for (mode, length, _), count in sorted(counts.items()):
            if count < len(method.runs):
                by_count.setdefault((mode, count), []).append(f"{length:,}")
        for (mode, count), lengths in by_count.items():
            windows = "" if mode == "nonoverlapping" else f" in {mode} windows"
            found.append(f"{method.label} at {', '.join(lengths)}{windows}: {count} of {len(method.runs)} seeds")
    return found
