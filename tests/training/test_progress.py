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
