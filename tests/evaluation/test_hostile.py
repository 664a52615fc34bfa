"""evaluation.json and train.json from strangers: evaluation reads them, or refuses them in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainshort as ts
from tests.hostile_json import EVERY, survives
from trainshort.common.files import write_json
from trainshort.data import PrepareConfig
from trainshort.data.prepare import prepare
from trainshort.evaluation.records import add_record, read_records
from trainshort.evaluation.runs import open_run

RECORD: dict[str, Any] = {"length": 64, "mode": "sliding", "stride": 32, "split": "validation", "first_token": 1}
RECORD |= {"end_token": 65, "data": "text", "perplexity": 3.0, "dtype": "float32"}


@pytest.mark.parametrize("every", EVERY)
def test_evaluation_json(tmp_path: Path, every: int) -> None:
    add_record(tmp_path, RECORD, "0123456789abcdef")

    def use() -> None:
        read_records(tmp_path)
        before = (tmp_path / "evaluation.json").read_bytes()
        add_record(tmp_path, RECORD | {"length": 128}, "0123456789abcdef")
        (tmp_path / "evaluation.json").write_bytes(before)

    survives(tmp_path / "evaluation.json", use, home=tmp_path, every=every)


@pytest.mark.parametrize("every", EVERY)
def test_train_json(tmp_path: Path, every: int) -> None:
    (tmp_path / "a.txt").write_text("some text " * 100)
    source = PrepareConfig(sources=(str(tmp_path / "a.txt"),), out=str(tmp_path / "data"), validation_fraction=0.5)
    data = prepare(source, progress=False)
    model = ts.LanguageModel(ts.ModelConfig(vocab_size=257, d_model=16, num_layers=1, num_heads=2))
    ts.save(model, tmp_path / "run")
    write_json(tmp_path / "run" / "train.json", {"data": str(data), "length": 16})
    open_run(tmp_path / "run").usual_lengths()
    survives(
        tmp_path / "run" / "train.json",
        lambda: open_run(tmp_path / "run").usual_lengths(),
        home=tmp_path,
        every=every,
    )
