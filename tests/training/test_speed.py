"""Tokens a second and the share of the matrix rate: of training alone, and counted as the definition says."""

from __future__ import annotations

import pytest
import torch

import trainshort as ts
from trainshort.training import speed as module
from trainshort.training.speed import Speed, matrix_rate, operations_per_token

SIZES = {"vocab_size": 1000, "d_model": 64, "num_layers": 3, "num_heads": 4}


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_counted_by_hand(tied: bool) -> None:
    """Multiply-adds of all matrices, 1 for a norm's weight and bias, as 6 N says; scores and values of T / 2 keys."""
    model = ts.LanguageModel(ts.ModelConfig(**SIZES, tie_embeddings=tied))
    matrices = 3 * (64 * 192 + 64 * 64 + 2 * 64 * 256) + 1000 * 64
    norms = (2 * 3 + 1) * 2 * 64
    attention = 3 * 3 * (2 * 2 * 500 / 2 * 64)
    assert operations_per_token(model, 500) == 6 * (matrices + norms) + attention


def test_learned_positions_are_looked_up() -> None:
    plain = ts.LanguageModel(ts.ModelConfig(**SIZES))
    learned = ts.LanguageModel(ts.ModelConfig(**SIZES, position="learned", max_length=77))
    assert operations_per_token(learned, 50) == operations_per_token(plain, 50)


def test_only_training_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    speed = Speed(1000, operations=6, rate=12_000.0)
    clock[0] = 60.0  # compiling
    speed.add(1)
    assert speed.tokens_per_second is None
    assert speed.mfu is None
    speed.begin(1)
    for step in (2, 3):
        clock[0] += 1.0
        speed.add(step)
        assert speed.tokens_per_second == pytest.approx(1000.0)
        assert speed.mfu == pytest.approx(0.5)
    clock[0] += 30.0  # validation
    speed.begin(3)
    clock[0] += 2.0
    speed.add(4)
    assert speed.tokens_per_second == pytest.approx(500.0)


def test_there_is_no_rate_of_a_cpu() -> None:
    assert matrix_rate(torch.device("cpu")) is None
    speed = Speed(1000, operations=6, rate=None)
    speed.begin(0)
    speed.add(1)
    assert speed.mfu is None
