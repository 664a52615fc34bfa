"""Perplexity is that of a direct computation, whatever the windows, batches and chunks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import trainshort as ts
from tests.evaluation.models import model, text
from trainshort.evaluation.config import EvaluateConfig
from trainshort.evaluation.evaluate import evaluate
from trainshort.evaluation.records import key_of

TOKENS = text(300)
METHODS = ("alibi", "sinusoidal", "rotary", "t5", "none")


def direct(
    network: ts.LanguageModel, tokens: np.ndarray, length: int, stride: int, last: int, first: int = 0
) -> float:
    """Sum of losses, one place at a time: each from a forward pass over exactly the context its window gives it."""
    total = 0.0
    place = first
    while place < last:
        start = max(0, place + stride - length)
        end = min(last, max(place + stride, length) if start == 0 else place + stride)
        for here in range(place, end):
            context = torch.from_numpy(tokens[start : here + 1].astype(np.int64))[None]
            logits = network(context)[0, -1].double()
            total += F.cross_entropy(logits, torch.tensor(int(tokens[here + 1]))).item()
        place = end
    return total


@pytest.mark.parametrize("position", METHODS)
@pytest.mark.parametrize(("length", "stride"), [(16, 16), (24, 7), (60, 60)])
@torch.no_grad()
def test_the_sum_of_losses_is_that_of_a_direct_computation(position: str, length: int, stride: int) -> None:
    network = model(position)
    config = EvaluateConfig(lengths=(length,), mode="sliding", stride=stride, tokens=120)
    (record,) = evaluate(network, TOKENS, config)
    count = 120 // length * length
    assert record["scored_tokens"] == count
    expected = direct(network, TOKENS, length, stride, count)
    assert record["nll_sum"] == pytest.approx(expected, rel=2e-5)
    assert record["perplexity"] == pytest.approx(math.exp(expected / count), rel=1e-4)


@torch.no_grad()
def test_with_a_lead_early_tokens_have_context_too() -> None:
    network = model()
    (record,) = evaluate(network, TOKENS, EvaluateConfig(lengths=(32,), mode="sliding", stride=8, tokens=64, lead=24))
    assert record["first_token"] == 25
    assert record["nll_sum"] == pytest.approx(direct(network, TOKENS, 32, 8, 88, first=24), rel=2e-5)
    assert record["loss_by_position"]["count"][0] == 0  # nothing at the first place of any window


@pytest.mark.parametrize("position", METHODS)
def test_chunks_with_the_cache_change_nothing(position: str) -> None:
    network, tokens = model(position), text(1300)
    lengths = (200, 640)
    whole = evaluate(network, tokens, EvaluateConfig(lengths=lengths, chunk=1280))
    parts = evaluate(network, tokens, EvaluateConfig(lengths=lengths, chunk=128))
    for one, other in zip(whole, parts, strict=True):
        assert one["nll_sum"] == pytest.approx(other["nll_sum"], rel=1e-5)
        assert one["loss_by_position"]["count"] == other["loss_by_position"]["count"]


@given(length=st.integers(1, 80), tokens=st.integers(80, 200), batch_tokens=st.integers(1, 500))
@settings(max_examples=25)
def test_sliding_by_the_whole_length_is_nonoverlapping(length: int, tokens: int, batch_tokens: int) -> None:
    network = model()
    shared: dict[str, Any] = {"lengths": (length,), "tokens": tokens, "batch_tokens": batch_tokens, "kept": False}
    (one,) = evaluate(network, TOKENS, EvaluateConfig(**shared))
    (other,) = evaluate(network, TOKENS, EvaluateConfig(**shared, mode="sliding", stride=length))
    assert one["nll_sum"] == other["nll_sum"]
    assert one["loss_by_position"] == other["loss_by_position"]


@pytest.mark.parametrize("position", METHODS)
def test_dense_attention_gives_the_same_losses(position: str) -> None:
    """Of windows longer than a chunk too, which are not cut; and the model computes as before afterwards."""
    network, tokens = model(position), text(700)
    shared: dict[str, Any] = {"lengths": (100, 300), "chunk": 128}
    usual = evaluate(network, tokens, EvaluateConfig(**shared))
    dense = evaluate(network, tokens, EvaluateConfig(**shared, attention="dense"))
    for one, other in zip(usual, dense, strict=True):
        assert one["nll_sum"] == pytest.approx(other["nll_sum"], rel=1e-5)
        assert "attention" not in one
        assert other["attention"] == "dense"
        assert "kept" not in other
        assert key_of(one) != key_of(other)
    assert not network.trunk.dense


def test_all_lengths_and_modes_score_the_same_tokens() -> None:
    network = model()
    records = evaluate(network, TOKENS, EvaluateConfig(lengths=(7, 16, 100)))
    records += evaluate(network, TOKENS, EvaluateConfig(lengths=(16, 100), mode="sliding", stride=3))
    assert {(each["first_token"], each["end_token"], each["scored_tokens"]) for each in records} == {(1, 201, 200)}
    assert all(sum(each["loss_by_position"]["count"]) == 200 for each in records)


def test_loss_by_position_adds_up_and_shows_the_early_tokens() -> None:
    network = model()
    (record,) = evaluate(network, TOKENS, EvaluateConfig(lengths=(32,)))
    bins = record["loss_by_position"]
    assert math.fsum(bins["nll_sum"]) == pytest.approx(record["nll_sum"])
    assert bins["edges"][0] == 0
    assert bins["edges"][-1] == 32
    assert bins["count"] == [
        (end - start) * record["scored_tokens"] // 32
        for start, end in zip(bins["edges"], bins["edges"][1:], strict=False)
    ]


def test_learned_positions_record_that_they_cannot_go_on() -> None:
    network = model("learned", max_length=32)
    short, long = evaluate(network, TOKENS, EvaluateConfig(lengths=(32, 64)))
    assert short["perplexity"] > 1
    assert "learned positions end at 32 tokens" in long["skipped"]
    assert "perplexity" not in long


def test_a_diverged_model_is_recorded_not_fatal() -> None:
    network = model()
    with torch.no_grad():
        network.trunk.embedding.weight.fill_(float("nan"))
    (record,) = evaluate(network, TOKENS, EvaluateConfig(lengths=(16,), kept=False))
    assert "diverged" in record["skipped"]


class Counted:
    """Data that know their words and bytes: token t stands for t % 3 bytes, every fifth token starts a word."""

    train = validation = TOKENS

    def bytes_of(self, split: str, start: int, end: int) -> int:
        return int((TOKENS[start:end] % 3).sum())

    def words_of(self, split: str, start: int, end: int) -> int:
        return int((np.arange(start, end) % 5 == 0).sum())


def test_words_and_bytes_are_those_of_the_scored_tokens() -> None:
    (record,) = evaluate(model(), Counted(), EvaluateConfig(lengths=(50,), tokens=100))
    size = int((TOKENS[1:101] % 3).sum())
    assert (record["bytes"], record["words"]) == (size, 20)
    assert record["bits_per_byte"] == pytest.approx(record["nll_sum"] / math.log(2) / size)
    assert record["perplexity_per_word"] == pytest.approx(math.exp(record["nll_sum"] / 20))


def test_speed_and_memory_are_recorded() -> None:
    (record,) = evaluate(model(), TOKENS, EvaluateConfig(lengths=(50,)))
    assert record["tokens_per_second"] > 0
    assert record["peak_memory_bytes"] > 2**20
    assert record["fed_tokens"] == record["scored_tokens"]


def test_the_mode_of_a_model_comes_back() -> None:
    network = model().train()
    evaluate(network, TOKENS, EvaluateConfig(lengths=(50,)))
    assert network.training


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="token 40, the model's vocabulary ends at 30"):
        evaluate(model(), np.full(100, 40, dtype=np.uint16), EvaluateConfig(lengths=(10,)))


def test_a_run_gets_its_records_at_once(tmp_path: Path) -> None:
    network = model()
    ts.save(network, tmp_path)
    seen: list[int] = []

    def check(record: dict[str, Any]) -> None:
        stored = json.loads((tmp_path / "evaluation.json").read_text())["records"]
        assert record in stored
        seen.append(len(stored))

    evaluate(tmp_path, TOKENS, EvaluateConfig(lengths=(16, 32)), on_record=check)
    evaluate(tmp_path, TOKENS, EvaluateConfig(lengths=(16, 32)), on_record=check)
    evaluate(tmp_path, TOKENS, EvaluateConfig(lengths=(32, 64), tokens=128), on_record=check)  # other tokens
    assert seen == [1, 2, 2, 2, 3, 4]


def test_records_of_other_weights_and_other_tokens_stay(tmp_path: Path) -> None:
    other = TOKENS[::-1].copy()
    ts.save(model(), tmp_path)
    evaluate(tmp_path, TOKENS, EvaluateConfig(lengths=(16,)))
    evaluate(tmp_path, other, EvaluateConfig(lengths=(16,)))
    ts.save(model(num_layers=1), tmp_path)
    evaluate(tmp_path, TOKENS, EvaluateConfig(lengths=(16,)))
    evaluate(tmp_path, TOKENS.astype(np.int32), EvaluateConfig(lengths=(16,)))  # the same tokens in more bytes
    stored = json.loads((tmp_path / "evaluation.json").read_text())["records"]
    assert len(stored) == 3
    assert len({each["model"] for each in stored}) == len({each["data"] for each in stored}) == 2


def test_progress_counts_every_scored_token() -> None:
    seen: dict[int, int] = {}

    def on_scored(length: int, count: int, total: int) -> None:
        assert total == 600
        seen[length] = seen.get(length, 0) + count

    evaluate(model(), text(700), EvaluateConfig(lengths=(10, 300), chunk=128), on_scored=on_scored)
    assert seen == {10: 600, 300: 600}
