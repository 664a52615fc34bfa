"""A model tested with other options of its position method than it was saved with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainshort as ts
from tests.evaluation.models import model, text
from trainshort.evaluation.about import place_for
from trainshort.evaluation.config import EvaluateConfig
from trainshort.evaluation.evaluate import evaluate
from trainshort.evaluation.recall import recall
from trainshort.evaluation.recall_config import RecallConfig
from trainshort.report.reading import read_runs

LENGTHS = (16, 64)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "rotary-16"
    ts.save(model("rotary"), folder)
    (folder / "train.json").write_text(json.dumps({"length": 16}))
    return folder


def losses(of: Path | ts.LanguageModel, **options: object) -> list[float]:
    config = EvaluateConfig(lengths=LENGTHS, dtype=None if isinstance(of, ts.LanguageModel) else "float32")
    return [record["perplexity"] for record in evaluate(of, text(400), config, **options)]  # type: ignore[arg-type]


def test_figures_are_those_of_a_model_with_the_options(run: Path, tmp_path: Path) -> None:
    options = {"scaling": "yarn"}
    stretched = ts.load(run, position_options={**options, "trained_length": 16})
    place = place_for(run, {"format": "trainshort"}, tmp_path / "yarn", options)
    found = losses(run, position_options=options, out=place)
    assert found == losses(stretched)
    plain = losses(run)
    assert found[0] == plain[0], "no longer than the length of the training"
    assert found[1] != plain[1]
    told = json.loads((place / "evaluation.json").read_text())
    assert told["about"]["name"] == "rotary-16-scaling=yarn-trained_length=16"
    assert told["about"]["model"]["position_options"] == {"scaling": "yarn", "trained_length": 16}
    shown = {each.name: [record["perplexity"] for record in each.records] for each in read_runs([run, place]).runs}
    assert shown == {"rotary-16": plain, "rotary-16-scaling=yarn-trained_length=16": found}


def test_figures_with_different_options_never_share_a_folder(run: Path, tmp_path: Path) -> None:
    config = {"format": "trainshort"}
    assert place_for(run, config, None) == run
    assert place_for(run, config, None, {"factor": 4.0}) == Path("evaluations/rotary-16-factor=4.0")
    with pytest.raises(ValueError, match="keeps the figures of the model as it was saved"):
        place_for(run, config, run, {"factor": 4.0})
    place = tmp_path / "other"
    losses(run, position_options={"scaling": "ntk", "factor": 4.0}, out=place)
    for options in ({"scaling": "ntk", "factor": 2.0}, {}):
        with pytest.raises(FileExistsError, match="figures of other weights"):
            losses(run, position_options=options, out=place)
    assert losses(run, position_options={"scaling": "ntk", "factor": 4.0}, out=None)
    assert not (run / "evaluation.json").exists()


def test_recall_takes_them_too(run: Path, tmp_path: Path) -> None:
    config = RecallConfig(lengths=(128,), trials=2, depths=(0,))
    recall(run, text(400), config, out=tmp_path / "yarn", position_options={"scaling": "yarn"})
    told = json.loads((tmp_path / "yarn" / "recall.json").read_text())
    assert told["about"]["name"] == "rotary-16-scaling=yarn-trained_length=16"


def test_what_has_no_options_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="for a model in a folder"):
        losses(model("rotary"), position_options={"scaling": "yarn"})
    with pytest.raises(ValueError, match="rotary scaling must be one of none, ntk, yarn; got 'linear'"):
        losses(run, position_options={"scaling": "linear"})
