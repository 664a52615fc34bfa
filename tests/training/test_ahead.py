"""Batches that are made ahead are the same batches, in order, and what goes wrong in making them is told."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from trainshort.training.ahead import AHEAD, BatchesAhead
from trainshort.training.batches import Batch

CPU = torch.device("cpu")


def parts_of(step: int) -> list[Batch]:
    return [Batch(torch.full((1, 2), step), torch.full((1, 2), part), None, 2) for part in range(2)]


def test_every_step_in_order() -> None:
    with BatchesAhead(parts_of, CPU, first=4, last=9) as ahead:
        for step in range(4, 10):
            found = ahead.next()
            assert [int(part.inputs[0, 0]) for part in found] == [step, step]
            assert [int(part.targets[0, 0]) for part in found] == [0, 1]
    assert not ahead.thread.is_alive()


def test_a_few_are_made_ahead_and_no_more() -> None:
    made: list[int] = []

    def make(step: int) -> list[Batch]:
        made.append(step)
        return parts_of(step)

    with BatchesAhead(make, CPU, first=1, last=100) as ahead:
        ahead.next()
        deadline = time.monotonic() + 5.0
        while len(made) < AHEAD + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert made == list(range(1, AHEAD + 3))  # one taken, some in the queue, one that waits for room
    assert not ahead.thread.is_alive()
    assert len(made) < 10


def test_errors_come_with_their_step() -> None:
    def make(step: int) -> list[Batch]:
        if step == 3:
            raise ValueError("the data has token 999")
        return parts_of(step)

    before = threading.active_count()
    with BatchesAhead(make, CPU, first=1, last=9) as ahead:
        ahead.next()
        ahead.next()
        with pytest.raises(ValueError, match="token 999"):
            ahead.next()
    assert threading.active_count() == before
