"""metrics.jsonl: a line for each logged step, each whole, and none from beyond the checkpoint a run goes on from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from trainshort.common.checks import is_whole
from trainshort.common.extras import needed
from trainshort.common.files import write_text
from trainshort.common.reading import parse_json, read_text

LARGEST = 2**30  # bytes: a run of five million logged steps


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, or of the one in a run folder; a last line that was cut is left out."""
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    rows = []
    for line in read_text(path, "train writes it", largest=LARGEST).splitlines(keepends=True):
        try:
            row = parse_json(line) if line.endswith("\n") else None
        except ValueError:
            row = None
        if isinstance(row, dict) and is_whole(row.get("step")):
            rows.append(row)
    return rows


class Metrics:
    """Appends to metrics.jsonl and, if asked, to TensorBoard's event files."""

    def __init__(self, folder: Path, *, after_step: int, tensorboard: bool) -> None:
        """after_step: the step that the run goes on from. Later lines are from a future that did not happen."""
        self.events = _events(folder, after_step) if tensorboard else None
        self.path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(self.path) if row["step"] <= after_step] if self.path.exists() else []
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self.file: IO[str] = self.path.open("a", encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if self.events is not None:
            for name, value in row.items():
                if name != "step":
                    self.events.add_scalar(name, value, row["step"])

    def push_to_disk(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
        if self.events is not None:
            self.events.close()


class NoMetrics:
    """For processes other than the first, which writes for all of them."""

    def add(self, row: dict[str, Any]) -> None:
        """Nothing is written."""

    def push_to_disk(self) -> None:
        """There is nothing to push."""

    def close(self) -> None:
        """There is nothing to close."""


def _events(folder: Path, after_step: int) -> Any:
    with needed("tensorboard", by="tensorboard (--tensorboard)"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(folder / "tensorboard", purge_step=after_step + 1)
