"""`trainshort inspect`, and `evaluate` of public models, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import trainshort as ts
from tests.cli.run_cli import run_cli
from tests.models.public import folders
from trainshort.data.tokenizer import ByteTokenizer

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("_elsewhere")


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write to folders of the current one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A text with a few words, said again and again. " * 12)
    return path


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "small"
    torch.manual_seed(0)
    model = ts.Encoder(ts.ModelConfig(vocab_size=257, d_model=32, num_layers=2, num_heads=4, causal=False))
    model.tokenizer = ByteTokenizer()
    ts.save(model, folder)
    return folder


def test_a_run_is_shown_and_written(capsys: Capture, untrained: Path, text: Path) -> None:
    before = sorted(untrained.iterdir())
    done = run_cli(capsys, "inspect", untrained, "--text", text, "--tokens", 300, "--no-figures")
    assert done.status == 0
    rows = [line.split() for line in done.out.splitlines()]
    assert [row for row in rows if row[:3] == ["1", "1", "0.25"]], done.out
    assert "trained at 32 tokens" in done.out
    out = Path("inspections/untrained")
    found = json.loads((out / "inspection.json").read_text())
    assert (found["length"], found["about"]["length"]) == (300, 32)
    assert [each["length"] for each in found["by_length"]] == [128, 256, 300]
    assert found["looks"][0]["query_text"] in text.read_text()
    assert (out / "inspection.html").is_file()
    assert sorted(untrained.iterdir()) == before
    again = run_cli(capsys, "inspect", untrained, "--text", text, "--lengths", 64, "--no-figures", "--no-heads")
    assert again.status == 0, "an earlier inspection is replaced"
    assert "--heads lists every head" in again.out


def test_an_encoder_is_inspected_and_not_evaluated(capsys: Capture, encoder: Path, text: Path) -> None:
    assert run_cli(capsys, "inspect", encoder, "--text", text, "--no-figures", "--out", "seen").status == 0
    assert not json.loads(Path("seen/inspection.json").read_text())["causal"]
    refused = run_cli(capsys, "evaluate", encoder, "--text", text, "--lengths", 8).one_sentence()
    assert "holds an encoder" in refused


def test_what_cannot_be_inspected_is_named(capsys: Capture, untrained: Path, text: Path, tmp_path: Path) -> None:
    def refused(*words: object) -> str:
        return run_cli(capsys, "inspect", *words).one_sentence()

    assert "no such folder" in refused("nowhere")
    Path("empty").mkdir()
    assert "empty/config.json: no such file" in refused("empty")
    Path("nothing.txt").write_text("")
    assert "nothing.txt: is empty" in refused(untrained, "--text", "nothing.txt")
    Path("binary").write_bytes(bytes(range(256)))
    assert "is not UTF-8" in refused(untrained, "--text", "binary")
    assert "--lengths must be at most the" in refused(untrained, "--text", text, "--lengths", 9999)
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    assert "full is there already and holds other things (mine.txt)" in refused(untrained, "--out", "full")
    assert [path.name for path in Path("full").iterdir()] == ["mine.txt"]
    baichuan = folders.write_folder(tmp_path / "baichuan", folders.BAICHUAN, folders.baichuan_tensors())
    assert "no tokenizer.json, so no text can be made tokens" in refused(baichuan)
    assert not Path("inspections").exists(), "nothing was written"


def test_one_token_is_enough_and_brackets_in_names_are_text(capsys: Capture, untrained: Path) -> None:
    Path("a[red]b[bold].txt").write_text("x")
    done = run_cli(capsys, "inspect", untrained, "--text", "a[red]b[bold].txt", "--no-figures")
    assert done.status == 0
    assert "a[red]b[bold].txt" in done.out.replace("\n", "")


def test_a_public_model_is_evaluated_beside_a_run(
    capsys: Capture, untrained: Path, text: Path, tmp_path: Path
) -> None:
    config = folders.BAICHUAN | {"vocab_size": 257}
    tensors = folders.baichuan_tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(257, tensors[name].shape[1])
    public = folders.write_folder(tmp_path / "downloads" / "baichuan", config, tensors, files=3)
    (public / "tokenizer.json").write_text(ByteTokenizer().to_str())
    before = {path.name: path.stat().st_mtime_ns for path in public.iterdir()}
    done = run_cli(capsys, "evaluate", public, "--text", text, "--lengths", 64, 128)
    assert done.status == 0, done.error
    assert "evaluations/baichuan/evaluation.json holds these figures" in done.out
    assert {path.name: path.stat().st_mtime_ns for path in public.iterdir()} == before
    done = run_cli(capsys, "evaluate", untrained, "--text", text, "--lengths", 64, 128, "--out", "own")
    assert done.status == 0, done.error
    done = run_cli(capsys, "report", "evaluations/baichuan", "own", "--no-figures")
    assert done.status == 0, done.error
    assert done.out.startswith("report/report.html: 2 runs")
    page = Path("report/report.html").read_text()
    for label in ("baichuan, L = 64", "untrained, L = 32"):
        assert f'data-method="{label}"' in page


def test_texts_that_cannot_be_scored_are_refused(
    capsys: Capture, untrained: Path, text: Path, prepared: Path
) -> None:
    def refused(*words: object) -> str:
        return run_cli(capsys, "evaluate", untrained, "--out", "own", *words).one_sentence()

    Path("one.txt").write_text("x")
    assert "1 tokens are too few" in refused("--text", "one.txt", "--lengths", 4)
    assert "too few for windows of 4,096" in refused("--text", text, "--lengths", 4096)
    assert "both say what to evaluate on" in refused("--text", text, "--data", prepared, "--lengths", 4)
    assert "--split is for prepared --data" in refused("--text", text, "--split", "train", "--lengths", 4)
    assert not Path("own").exists()
