"""Training trains: every method and optimizer lowers the loss; what is logged is what happened."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trainshort as ts
from tests.training.small import metrics_of, small_config
from trainshort.cli.train import Flags, run
from trainshort.data.dataset import TokenData
from trainshort.evaluation.config import EvaluateConfig
from trainshort.evaluation.evaluate import evaluate
from trainshort.models import LanguageModel
from trainshort.training.optimizer import Optimizer
from trainshort.training.progress import TrainProgress
from trainshort.training.run import RunFolder
from trainshort.training.train import train


@pytest.mark.parametrize("position", ["alibi", "fox", "sinusoidal", "learned", "rotary", "t5", "kerple", "none"])
def test_every_position_method_learns(data: Path, tmp_path: Path, position: str) -> None:
    config = small_config(
        data, tmp_path / "run", position=position, steps=60, lr=1e-2, dropout=0.0, checkpoint_every=0
    )
    rows = metrics_of(train(config, progress=False))
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 60
    assert losses[0] > 5.4
    assert losses[-1] < 3.4
    assert [row["step"] for row in rows if "validation_loss" in row] == list(range(4, 61, 4))


def test_muon_learns_and_takes_the_hidden_matrices(data: Path, tmp_path: Path) -> None:
    config = small_config(data, tmp_path / "run", optimizer="muon", steps=40, lr=1e-2, dropout=0.0)
    losses = [row["loss"] for row in metrics_of(train(config, progress=False)) if "loss" in row]
    assert losses[-1] < 3.4
    model = LanguageModel(ts.ModelConfig.from_dict(config.model_fields(257)))
    parts = Optimizer(model, config).parts
    muon = {id(each) for group in parts["muon"].param_groups for each in group["params"]}
    hidden = {id(each) for name, each in model.trunk.blocks.named_parameters() if each.dim() == 2}
    assert muon == hidden
    adamw = {id(each) for group in parts["adamw"].param_groups for each in group["params"]}
    assert muon | adamw == {id(each) for each in model.parameters()}
    assert not muon & adamw


def test_only_matrices_decay(data: Path, tmp_path: Path) -> None:
    config = small_config(data, tmp_path / "run")
    groups = (
        Optimizer(LanguageModel(ts.ModelConfig.from_dict(config.model_fields(257))), config)
        .parts["adamw"]
        .param_groups
    )
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(each.dim() >= 2 for each in groups[0]["params"])
    assert all(each.dim() < 2 for each in groups[1]["params"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_of_norms_are_no_matrices(data: Path, tmp_path: Path, optimizer: str) -> None:
    """Those of query_norm, key_norm and output_norm have a row for each head: they neither decay nor go to Muon."""
    fields = {"position": "fox", "norm": "rmsnorm", "qk_norm": True, "output_norm": True, "kv_shift": True}
    config = small_config(data, tmp_path / "run", optimizer=optimizer)
    model = LanguageModel(ts.ModelConfig.from_dict(config.model_fields(257) | fields))
    found = Optimizer(model, config)

    def names(part: str, decays: bool) -> set[str]:
        groups = [group for group in found.parts[part].param_groups if (group["weight_decay"] > 0) == decays]
        return {found.names[id(each)] for group in groups for each in group["params"]}

    first = {name.removeprefix("trunk.blocks.0.") for name in names("adamw", False) if ".blocks.0." in name}
    norms = {f"attention.{name}_norm.weight" for name in ("query", "key", "output")}
    assert norms < first
    assert {name for name, _ in model.named_parameters() if "norm" in name} <= names("adamw", False)
    assert "trunk.embedding.weight" in names("adamw", True)
    assert "trunk.blocks.0.attention.shift.shares.weight" in names("muon" if optimizer == "muon" else "adamw", True)
    if optimizer == "muon":
        assert not names("muon", False)


def test_the_validation_loss_is_a_direct_computation(data: Path, whole: Path) -> None:
    model, tokens = ts.load(whole), TokenData(data).validation
    assert isinstance(model, LanguageModel)
    total = 0.0
    for start in range(0, 128, 32):
        window = torch.from_numpy(tokens[start : start + 33].astype("int64"))[None]
        total += float(model.loss(window[:, :-1], window[:, 1:], reduction="sum").detach())
    assert metrics_of(whole)[-1]["validation_loss"] == pytest.approx(total / 128, rel=1e-6)
    assert metrics_of(whole)[-1]["validation_tokens"] == 128


def test_progress(capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path) -> None:
    train(small_config(data, tmp_path / "run", steps=2))
    line = capsys.readouterr().err
    assert "alibi at 32, seed 0: step 2 of 2, loss 5." in line
    assert "tokens/s" in line
    assert "0:00 left" in line


def test_progress_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    train(small_config(data, tmp_path / "run", steps=2))
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tokens/s" in shown


def test_time_left() -> None:
    bar = TrainProgress("x", steps=1000, start=100, show=False)
    assert bar.time_left(200, pace=0.5) == "6:40 left"
    assert bar.time_left(101, pace=10.0) == "2:29:50 left"


def test_tensorboard_that_is_not_there(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'trainshort\[tensorboard\]'"):
        train(small_config(data, tmp_path / "run", tensorboard=True), progress=False)
    assert not (tmp_path / "run").exists()


def flags(**given: Any) -> Flags:
    return Flags.from_flags(**given)


def test_the_command_line_resumes_with_the_settings_of_the_run(data: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    sizes = {"num_layers": 1, "d_model": 16, "num_heads": 2, "length": 32, "batch_tokens": 64}
    first = flags(data=str(data), out=out, steps=3, **sizes, set=("gated=true", "position.trainable=true"))
    run(first)
    stored = RunFolder(out).config()
    assert stored.model_options == {"gated": True}
    assert stored.position_options == {"trainable": True}
    assert flags(out=out, resume=True).config() == stored
    assert flags(out=out, resume=True, checkpoint_every=7).config().checkpoint_every == 7
    run(flags(out=out, resume=True))
    with pytest.raises(ValueError, match=r"lr was 0\.001, is 0\.002 now"):
        run(flags(out=out, resume=True, lr=2e-3))
    with pytest.raises(ValueError, match=r"model_options was \{'gated': True\}"):
        run(flags(out=out, resume=True, set=("gated=false",)))


PRO = ("norm=rmsnorm", "activation=silu", "gated=true", "qk_norm=true", "kv_shift=true", "output_norm=true",
       "output_gate=true")  # fmt: skip
LONGER = ("position.trained_length=32",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "options"),
    [
        ("fox", PRO),
        ("fox", ("position.gate_bias=5", "position.rotary=true")),
        ("alibi", ("position.biased_heads=1", "position.rotary=true")),
        ("alibi", (*LONGER, "position.scaling=linear")),
        ("alibi", (*LONGER, "position.scaling=ntk")),
        ("rotary", (*LONGER, "position.scaling=ntk")),
        ("rotary", (*LONGER, "position.scaling=yarn")),
        ("kerple", ("position.kind=power",)),
    ],
    ids=str,
)
def test_options_are_trained_and_tested_on_longer_texts(
    data: Path, tmp_path: Path, position: str, options: tuple[str, ...]
) -> None:
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "length": 32, "batch_tokens": 128}
    out = tmp_path / "run"
    run(flags(data=str(data), out=str(out), position=position, steps=30, lr=1e-2, **sizes, set=options))
    losses = [row["loss"] for row in metrics_of(out) if "loss" in row]
    assert losses[-1] < losses[0] - 1.0
    short, long = evaluate(out, TokenData(data), EvaluateConfig(lengths=(32, 160), chunk=128, tokens=320))
    assert short["perplexity"] < math.exp(4.5)
    assert math.isfinite(long["perplexity"])
    model = ts.load(out)
    assert isinstance(model, LanguageModel)
    tokens = torch.randint(256, (1, 20))
    assert model.generate(tokens, max_new_tokens=8).shape == (1, 28)


def test_flags_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train needs --data"):
        flags(out=str(tmp_path)).config()
    with pytest.raises(ValueError, match="--set takes NAME=VALUE such as activation=silu, got 'gated'"):
        flags(out=str(tmp_path), data="data", set=("gated",)).config()
    with pytest.raises(FileNotFoundError, match=r"train\.json: no such file; a run is started with trainshort train"):
        flags(out=str(tmp_path / "none"), resume=True).config()
    assert flags(out=str(tmp_path / "none"), data="data", resume=True).config().data == "data"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_of_a_run_are_for_those_whom_the_umask_allows(data: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = train(small_config(data, tmp_path / "run", steps=2), progress=False)
    finally:
        os.umask(before)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


def test_dense_attention_trains_to_the_same_losses(data: Path, tmp_path: Path) -> None:
    """To rounding: another way to compute the same function. Reports are told by the name, which changes nothing."""
    shared = {"dropout": 0.0, "attention_dropout": 0.0}
    usual = train(small_config(data, tmp_path / "usual", **shared), progress=False)
    dense = train(small_config(data, tmp_path / "dense", attention="dense", name="mine", **shared), progress=False)
    losses = [[row["loss"] for row in metrics_of(each) if "loss" in row] for each in (usual, dense)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert RunFolder(dense).config().name == "mine"
    train(small_config(data, dense, attention="dense", name="yours", **shared), progress=False, resume=True)
    with pytest.raises(ValueError, match="attention was 'dense', is 'auto' now"):
        train(small_config(data, dense, **shared), progress=False, resume=True)


def test_dense_attention_is_for_whole_rows(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="packing 'across'"):
        small_config(data, tmp_path / "run", attention="dense", packing="documents")
