"""The position method that docs/positions.md adds in one file is trained, evaluated, saved and loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainshort as ts
from trainshort.data import PrepareConfig
from trainshort.data.prepare import prepare
from trainshort.experiments.compare import compare
from trainshort.experiments.config import CompareConfig
from trainshort.positions import POSITIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "positions.md"


def example(name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n```\w*\n(.*?)```\n<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found, name
    return found[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a reader would put the files, as the current folder; the method is forgotten afterwards."""
    (tmp_path / "shape.py").write_text(example("shape.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    POSITIONS.pop("shape", None)
    sys.modules.pop("shape", None)


def test_it_is_trained_evaluated_and_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "book.txt").write_text("A book of one sentence, again and again and again. " * 200)
    data = prepare(PrepareConfig(sources=("book.txt",), out="data", workers=1), progress=False)
    seen: list[CompareConfig] = []

    def smaller(config: CompareConfig) -> dict[str, Any]:
        """What the page runs, with a small text and few steps."""
        seen.append(config)
        return compare(
            CompareConfig(
                data=str(data),
                out="runs",
                positions=config.positions,
                length=(32,),
                multiples=(1, 2),
                steps=40,
                batch_tokens=256,
                lr=0.01,
                num_layers=1,
                d_model=32,
                num_heads=2,
                test_tokens=256,
                device="cpu",
            )
        )

    monkeypatch.setattr("trainshort.experiments.compare.compare", smaller)
    values: dict[str, Any] = {}
    exec(compile(example("experiment.py"), "experiment.py", "exec"), values)
    (config,) = seen
    runs = {run["position"]: run["records"] for run in values["result"]["runs"]}
    assert set(runs) == set(config.positions) >= {"shape"}
    for records in runs.values():
        assert [record["length"] for record in records] == [32, 64]
        assert records[0]["perplexity"] < 60  # 257 before training
    model = ts.load(folder / "runs" / "shape-32-seed0")
    assert type(model.position).__name__ == "ShiftedSinusoidal"


def test_its_options_are_checked_and_used(folder: Path) -> None:
    import shape  # type: ignore[import-not-found]  # noqa: F401
    import torch

    config = ts.ModelConfig(d_model=16, num_heads=2, position="shape", position_options={"largest": 5})
    assert ts.ModelConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="no option 'smallest'"):
        ts.ModelConfig(position="shape", position_options={"smallest": 1})
    model = ts.LanguageModel(config)
    tokens = torch.randint(0, 256, (1, 8))
    outcomes = {round(float(model.train()(tokens).detach().sum()), 4) for _ in range(40)}
    assert 2 <= len(outcomes) <= 6  # shifts of 0 to 5
    assert torch.equal(model.eval()(tokens), model(tokens))
