"""Which tokens a step sees: each window once an epoch, whatever the step that asks; documents apart if wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainshort as ts
from tests.training.small import small_config
from trainshort.data.dataset import TokenData
from trainshort.training.batches import IGNORED, Batch, Batches
from trainshort.training.config import TrainConfig
from trainshort.training.optimizer import learning_rate
from trainshort.training.train import train


@given(st.integers(2, 300), st.integers(1, 40), st.integers(0, 3))
def test_an_epoch_sees_every_window_once(count: int, length: int, seed: int) -> None:
    tokens = np.arange(count, dtype=np.uint16)
    if count <= length:
        with pytest.raises(ValueError, match="one sequence needs"):
            Batches(tokens, length, seed=seed)
        return
    batches = Batches(tokens, length, seed=seed)
    for epoch in range(3):
        starts = sorted(batches.starts(epoch * batches.windows, batches.windows))
        assert np.all(np.diff(starts) == length)
        assert starts[0] >= 0
        assert starts[-1] + length + 1 <= count


@given(st.integers(0, 60), st.integers(1, 20))
def test_the_order_depends_on_the_place_alone(first: int, count: int) -> None:
    tokens = np.arange(200, dtype=np.uint16)
    one, other = Batches(tokens, 7, seed=3), Batches(tokens, 7, seed=3)
    one.starts(0, 100)
    assert one.starts(first, count) == other.starts(0, first + count)[first:]


def test_seeds_and_epochs_differ() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    batches = Batches(tokens, 7, seed=0)
    n = batches.windows
    assert batches.starts(0, n) != batches.starts(n, n)
    assert batches.starts(0, n) != Batches(tokens, 7, seed=1).starts(0, n)


def test_targets_are_the_next_tokens() -> None:
    batch = Batches(np.arange(50, dtype=np.uint16), 6).batch([3, 20])
    assert batch.inputs.tolist() == [[3, 4, 5, 6, 7, 8], [20, 21, 22, 23, 24, 25]]
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert batch.count == 12


def test_documents_stay_apart() -> None:
    end = 9
    tokens = np.array([1, 2, end, 3, end, 4, 5, 6, end, 7, 8, end], dtype=np.uint16)
    borders = np.array([0, 3, 5, 9, 12])
    batch = Batches(tokens, 5, borders=borders, end_id=end).batch([0, 5])
    assert batch.inputs.tolist() == [[1, 2, end, 3, end, 4, 5, 6, end, 7]]
    assert batch.targets.tolist() == [[2, end, IGNORED, end, IGNORED, 5, 6, end, IGNORED, 8]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist()[:6] == [0, 3, 5, 9, 10, 10]
    assert len(batch.cu_seqlens) == 64
    assert batch.count == 7


@pytest.mark.parametrize("position", ["alibi", "learned", "rotary"])
def test_a_packed_loss_is_that_of_the_documents_alone(data: Path, position: str) -> None:
    folder = TokenData(data)
    batches = Batches(folder.train, 300, borders=folder.borders_of("train"), end_id=folder.end_id)
    batch = batches.batch([100, 900])
    fields = small_config(data, data, position=position, length=300, batch_tokens=600, dropout=0.0).model_fields(257)
    model = ts.LanguageModel(ts.ModelConfig.from_dict(fields))
    packed = model.loss(batch.inputs, batch.targets, cu_seqlens=batch.cu_seqlens, reduction="sum")
    alone, count = 0.0, 0
    for start in (100, 900):
        window = torch.from_numpy(folder.train[start : start + 301].astype(np.int64))
        ends = (window[:-1] == folder.end_id).nonzero().flatten().tolist()
        for low, high in zip([0, *(end + 1 for end in ends)], [*ends, 300], strict=True):
            if high > low:  # the targets of its tokens, its end among them; none for the end itself
                alone += float(
                    model.loss(window[None, low:high], window[None, low + 1 : high + 1], reduction="sum").detach()
                )
                count += high - low
    assert count == batch.count
    assert float(packed.detach()) == pytest.approx(alone, rel=1e-5)


def test_each_step_takes_the_next_windows(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    batch = Batches.batch

    def watched(self: Batches, starts: list[int], **options: Any) -> Batch:
        seen.append(starts)
        return batch(self, starts, **options)

    monkeypatch.setattr(Batches, "batch", watched)
    config = small_config(data, tmp_path / "run", eval_tokens=0)
    train(config, progress=False)
    assert [len(starts) for starts in seen] == [2] * 16
    wanted = Batches(TokenData(data).train, 32, seed=config.seed).starts(0, 32)
    assert [start for starts in seen for start in starts] == wanted


def test_accumulation_changes_no_more_than_rounding(data: Path, tmp_path: Path) -> None:
    losses = []
    for parts in (1, 4):
        config = small_config(data, tmp_path / str(parts), accumulation=parts, dropout=0.0, packing="documents")
        run = train(config, progress=False)
        losses.append([line for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line])
    assert len(losses[0]) == len(losses[1]) == 8
    for one, other in zip(*losses, strict=True):
        assert float(one.split('"loss": ')[1].split(",")[0]) == pytest.approx(
            float(other.split('"loss": ')[1].split(",")[0]), rel=1e-4
        )


def test_the_learning_rate() -> None:
    config = TrainConfig(data="a", out="b", steps=100, warmup=10, lr=2.0, final_lr=0.1)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[9] == max(rates) == 2.0
    assert rates[54] == pytest.approx(2.0 * 0.55)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(TrainConfig(data="a", out="b", warmup=0, steps=1), 1) > 0
