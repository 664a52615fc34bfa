"""Public models evaluated like runs: on a text in their own tokens, with their folder left alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainshort as ts
from tests.models.public import folders
from tests.models.public.native import bloom, mpt
from trainshort.data.plain import plain_text
from trainshort.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from trainshort.evaluation.about import check_place, configured_length, place_for
from trainshort.evaluation.config import EvaluateConfig
from trainshort.evaluation.evaluate import evaluate
from trainshort.evaluation.records import add_record, read_records
from trainshort.evaluation.runs import open_run

TEXT = "Words of a text, some of them long: extrapolation, and numbers such as 1729. " * 6


def saved(model: Any, folder: Path, tokenizer: Tokenizer, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def bloom_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("downloads") / "bloom-small"
    model = bloom(6, vocab_size=300, seq_length=48)
    return saved(model, folder, train_bpe(iter([TEXT]), 300), max_shard_size="40KB")


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@torch.no_grad()
def test_losses_are_those_of_transformers(bloom_folder: Path, text_file: Path, tmp_path: Path) -> None:
    from transformers import BloomForCausalLM

    before = content_of(bloom_folder)
    assert len(list(bloom_folder.glob("*.safetensors"))) > 1
    opened = open_run(bloom_folder, text=text_file)
    (record,) = evaluate(bloom_folder, opened.data, EvaluateConfig(lengths=(32,)), out=tmp_path / "out")
    tokens = torch.tensor(plain_text(text_file, opened.data.tokenizer).tokens.astype(np.int64))
    model = BloomForCausalLM.from_pretrained(bloom_folder).eval()
    total = 0.0
    for start in range(0, len(tokens) - 1, 32):  # to the end: the last window is shorter
        part = tokens[start : start + 33]
        logits = model(part[None, :-1]).logits[0].double()
        total += torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
    assert record["nll_sum"] == pytest.approx(total, rel=1e-5)
    assert record["scored_tokens"] == len(tokens) - 1
    first = len(opened.data.tokenizer.decode([int(tokens[0])]).encode())
    assert record["bytes"] == len(TEXT.encode()) - first
    assert record["bits_per_byte"] == pytest.approx(total / math.log(2) / record["bytes"], rel=1e-5)
    assert record["whole_text"] is True
    assert content_of(bloom_folder) == before
    assert read_records(tmp_path / "out") == [record]
    about = json.loads((tmp_path / "out" / "evaluation.json").read_text())["about"]
    assert (about["name"], about["length"], about["model"]["num_heads"]) == ("bloom-small", 48, 6)


def test_nothing_is_written_unasked(bloom_folder: Path, text_file: Path) -> None:
    before = content_of(bloom_folder)
    evaluate(bloom_folder, open_run(bloom_folder, text=text_file).data, EvaluateConfig(lengths=(16,)))
    assert content_of(bloom_folder) == before


def test_models_with_other_tokens_are_tested_on_the_same_text(
    bloom_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    other = saved(mpt(4, vocab_size=257), tmp_path / "mpt", ByteTokenizer())
    found = [
        evaluate(folder, open_run(folder, text=text_file).data, EvaluateConfig(lengths=(16,)))[0]
        for folder in (bloom_folder, other)
    ]
    assert found[0]["data"] == found[1]["data"]
    assert found[0]["tokenizer"] != found[1]["tokenizer"]
    assert all(record["whole_text"] for record in found)
    limited = evaluate(other, open_run(other, text=text_file).data, EvaluateConfig(lengths=(16,), tokens=40))
    assert (limited[0]["whole_text"], limited[0]["scored_tokens"]) == (False, 32)


def test_figures_of_two_models_never_share_a_folder(bloom_folder: Path, text_file: Path, tmp_path: Path) -> None:
    other = saved(mpt(4, vocab_size=257), tmp_path / "mpt", ByteTokenizer())
    for folder in (bloom_folder, bloom_folder):  # the same model twice is fine
        data = open_run(folder, text=text_file).data
        evaluate(folder, data, EvaluateConfig(lengths=(16,)), out=tmp_path / "out")
    with pytest.raises(FileExistsError, match="holds figures of other weights"):
        evaluate(other, open_run(other, text=text_file).data, EvaluateConfig(lengths=(16,)), out=tmp_path / "out")


def test_figures_never_go_to_a_run_of_another_model(bloom_folder: Path, text_file: Path, tmp_path: Path) -> None:
    data = open_run(bloom_folder, text=text_file).data
    add_record(tmp_path, {"length": 8, "mode": "nonoverlapping", "stride": 8}, "0123456789abcdef")
    before = (tmp_path / "evaluation.json").read_bytes()
    with pytest.raises(FileExistsError, match="holds figures of other weights: name another"):
        evaluate(bloom_folder, data, EvaluateConfig(lengths=(16,)), out=tmp_path)
    assert (tmp_path / "evaluation.json").read_bytes() == before


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"seq_length": 2048}, 2048),
        ({"max_seq_len": 4096}, 4096),
        ({"model_max_length": 8}, 8),
        ({"max_position_embeddings": 512}, 512),
        ({"seq_length": "long"}, None),
        ({"seq_length": True}, None),
        ({}, None),
    ],
)
def test_the_configured_length_is_that_of_the_config(config: dict[str, Any], length: int | None) -> None:
    assert configured_length(config) == length


def test_usual_lengths_are_multiples_of_the_configured_one(bloom_folder: Path, text_file: Path) -> None:
    opened = open_run(bloom_folder, text=text_file)
    count = len(opened.data.tokens) - 1
    assert opened.usual_lengths() == tuple(48 * each for each in (1, 2, 4, 8, 16) if 48 * each <= count)


def test_without_a_text_a_public_model_reads_the_embedded_one(bloom_folder: Path) -> None:
    assert open_run(bloom_folder).data.folder == "the Python library's source"


def test_encoders_and_models_without_a_tokenizer_are_refused_and_say_why(tmp_path: Path) -> None:
    encoder = folders.write_folder(tmp_path / "mosaic", folders.MOSAIC, folders.mosaic_tensors())
    with pytest.raises(ValueError, match="holds an encoder, which sees both sides"):
        open_run(encoder)
    ours = ts.Encoder(ts.ModelConfig(d_model=16, num_layers=1, num_heads=2, causal=False))
    ts.save(ours, tmp_path / "ours")
    with pytest.raises(ValueError, match="holds an encoder"):
        open_run(tmp_path / "ours", text=tmp_path / "text.txt")
    baichuan = folders.write_folder(tmp_path / "baichuan", folders.BAICHUAN, folders.baichuan_tensors())
    (baichuan / "tokenizer.model").write_bytes(b"SentencePiece")
    with pytest.raises(FileNotFoundError, match=r"a SentencePiece tokenizer\.model, which is not read"):
        open_run(baichuan)


def test_the_place_of_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "downloads" / "bloom"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert place_for(model, {}, None) == Path("evaluations/bloom")
    assert place_for(model, {"format": "trainshort"}, None) == model
    assert place_for(model, {}, model) == model, "asked for"
    (tmp_path / "other").mkdir()
    assert place_for(model, {}, tmp_path / "other") == tmp_path / "other"
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds other things \(notes.txt\), but no evaluation.json"):
        place_for(model, {}, tmp_path / "other")
    for path in (tmp_path / "other" / "notes.txt", tmp_path / "other" / "notes.txt" / "inner"):
        with pytest.raises(FileExistsError, match=r"notes\.txt is a file"):
            check_place(path, "evaluation.json")


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # for root, every folder can be written
    with pytest.raises(PermissionError, match="name another folder for the figures with out"):
        place_for(tmp_path, {"format": "trainshort"}, None)
    with pytest.raises(PermissionError, match="cannot be written to"):
        check_place(tmp_path / "new", "inspection.json")
