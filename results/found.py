"""What lies in results/, by question: perplexities, losses, speeds, recall, windows. Reads files alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from plan import CONTENDERS, failure, validation_loss

Record = dict[str, Any]
WIKITEXT = "wikitext-103-valid"
LABELS = {
    "alibi": "ALiBi", "sinusoidal": "sinusoidal", "rotary": "rotary", "t5": "T5 bias", "fox": "FoX",
    "alibi-free": "ALiBi, 2 of 8 heads without slope", "learned": "learned", "none": "no positions",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    folder: Path

    def read(self, name: str) -> Record:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else {}

    @cached_property
    def train(self) -> Record:
        return self.read("train.json")

    @cached_property
    def made(self) -> Record:
        return self.read("made.json")

    @cached_property
    def records(self) -> list[Record]:
        return self.read("evaluation.json").get("records", [])

    @cached_property
    def recall(self) -> list[Record]:
        return [each for each in self.read("recall.json").get("records", []) if "correct" in each]

    @cached_property
    def metrics(self) -> list[Record]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def contender(self) -> str:
        """alibi of alibi-512-seed0."""
        return self.folder.name.rsplit("-", 2)[0]

    @property
    def diverged(self) -> bool:
        return failure(self.folder, "train") == "diverged"

    @property
    def validation_loss(self) -> float | None:
        return validation_loss(self.folder)

    def ran_out_of_memory(self, command: str) -> bool:
        return failure(self.folder, command) == "not enough memory"

    @property
    def state(self) -> Record:
        """Of training that came to its end; empty for other."""
        state = self.read("state/state.json")
        return state if state.get("finished") else {}

    @property
    def training_speed(self) -> float | None:
        """Tokens a second over the later half of the logged steps, without compiling."""
        if not self.state:
            return None
        rows = [row for row in self.metrics if "loss" in row]
        first, last = (rows[len(rows) // 2 - 1], rows[-1]) if len(rows) > 3 else (None, None)
        if first is None or last is None or last["seconds"] <= first["seconds"]:
            return None
        return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])

    @property
    def training_memory(self) -> int | None:
        return self.state.get("peak_memory_bytes")

    def tested(self, name: str) -> float | int | None:
        """A figure of the one test of a speed."""
        return self.records[0].get(name) if self.records else None


class Found:
    def __init__(self, results: Path) -> None:
        self.results = results

    def runs(self, part: str) -> list[Run]:
        return [Run(path.parent) for path in sorted(self.results.glob(f"{part}/*/made.json"))]

    @cached_property
    def trained(self) -> list[Run]:
        return self.runs("extrapolation")

    def of(self, contender: str, length: int) -> list[Run]:
        """All seeds."""
        return [run for run in self.trained if run.contender == contender and run.train.get("length") == length]

    @cached_property
    def lengths(self) -> list[int]:
        """That runs were trained at; the first is the short one."""
        return sorted({run.train["length"] for run in self.trained})

    @cached_property
    def short(self) -> int | None:
        """The shortest that was trained at; where none was, of which speeds are known."""
        return next(iter(self.lengths or self.speed_lengths("dense")), None)

    @cached_property
    def texts(self) -> list[str]:
        """WikiText first."""
        names = {text_of(record) for run in self.trained for record in run.records}
        return sorted(names, key=lambda name: (name != WIKITEXT, name))

    def perplexities(self, contender: str, trained: int, length: int, text: str = WIKITEXT) -> dict[int, float]:
        """Nonoverlapping, of the whole text: by seed."""
        return {
            run.train["seed"]: each["perplexity"]
            for run in self.of(contender, trained)
            for each in run.records
            if each["mode"] == "nonoverlapping" and each["length"] == length and text_of(each) == text
            if each.get("perplexity") is not None
        }

    def perplexity(self, contender: str, trained: int, length: int, text: str = WIKITEXT) -> float | None:
        """The mean over seeds."""
        found = self.perplexities(contender, trained, length, text)
        return statistics.fmean(found.values()) if found else None

    def sliding(self, contender: str, trained: int, stride: int | None, text: str = WIKITEXT) -> dict[int, float]:
        """Perplexity by length, the mean over seeds, of windows that move by `stride`; None: by half their length."""
        by_length: dict[int, list[float]] = {}
        for run in self.of(contender, trained):
            for each in run.records:
                wanted = each["length"] // 2 if stride is None else stride
                slid = each["mode"] == "sliding" and each["stride"] == wanted and text_of(each) == text
                if slid and each.get("perplexity") is not None:
                    by_length.setdefault(each["length"], []).append(each["perplexity"])
        return {length: statistics.fmean(values) for length, values in sorted(by_length.items())}

    @cached_property
    def small_stride(self) -> int | None:
        """The smallest, at which every token has a full window."""
        strides = {each["stride"] for run in self.trained for each in run.records if each["mode"] == "sliding"}
        return min(strides) if strides and min(strides) < (self.short or 0) // 2 else None

    def tested_lengths(self, trained: int, text: str = WIKITEXT) -> list[int]:
        found = {
            each["length"]
            for run in self.trained
            if run.train.get("length") == trained
            for each in run.records
            if each["mode"] == "nonoverlapping" and text_of(each) == text
        }
        return sorted(found)

    def scaled(self, contender: str, trained: int) -> dict[str, Run]:
        """The first seed stretched for longer texts, by how."""
        stem = f"{contender}-{trained}-seed0-"
        runs = [run for run in self.runs("scaled") if run.folder.name.startswith(stem) and run.records]
        return {run.folder.name.removeprefix(stem): run for run in runs}

    @cached_property
    def contenders(self) -> list[str]:
        """In the order of the plan, as far as there are results."""
        there = {run.contender for run in self.trained}
        return [each.name for each in CONTENDERS if each.name in there]

    def speed(self, contender: str, attention: str, length: int) -> Run | None:
        return next(
            (run for run in self.runs("speed") if run.folder.name == f"{contender}-{attention}-{length}"), None
        )

    def speed_lengths(self, attention: str) -> list[int]:
        names = (run.folder.name.rsplit("-", 2) for run in self.runs("speed"))
        return sorted({int(length) for _, way, length in names if way == attention})

    def every(self) -> Iterator[Run]:
        for part in ("rates", "extrapolation", "scaled", "speed", "checkpoint"):
            yield from self.runs(part)


def text_of(record: Record) -> str:
    return Path(str(record.get("data_folder"))).stem
