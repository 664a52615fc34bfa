"""The speed that is shown is the current one."""

from __future__ import annotations

import pytest

from trainshort.training import progress
from trainshort.training.progress import TrainProgress
from trainshort.training.speed import Speed


def test_the_line_shows_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    bar = TrainProgress("alibi at 64, seed 1", steps=60, start=0, show=True)
    speed = Speed(1000, 1, None)
    speed.begin(0)
    with bar:
        for step in range(1, 31):
            clock[0] += 0.1
            speed.add(step)
            bar.update(step, 3.0, speed)
        for step in range(31, 61):
            clock[0] += 1.0
            speed.add(step)
            bar.update(step, 2.0, speed)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("alibi at 64, seed 1: step 42 of 60, loss 2.0000, 1,000 tokens/s, 0:18 left")
    assert lines[-1].startswith("alibi at 64, seed 1: step 60 of 60")


def test_nothing_is_said_of_speed_before_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainProgress("alibi at 64, seed 1", steps=60, start=0, show=True) as bar:
        bar.lines.every = 0.0
        bar.update(1, 3.0, Speed(1000, 1, None))
    assert capsys.readouterr().err == "alibi at 64, seed 1: step 1 of 60, loss 3.0000\n"


def test_the_share_of_the_matrix_rate_and_of_keys(capsys: pytest.CaptureFixture[str]) -> None:
    speed = Speed(1000, operations=6, rate=12_000.0)
    speed.tokens_per_second = 1000.0
    with TrainProgress("x", steps=60, start=0, show=True) as bar:
        bar.update(60, 3.0, speed, keys_kept=0.374)
    expected = "x: step 60 of 60, loss 3.0000, 1,000 tokens/s (50% of the matrix rate), 37% of keys, 0:00 left\n"
    assert capsys.readouterr().err == expected
