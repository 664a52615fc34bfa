"""What a comparison shows of itself: every run by its number and seed, and the time that is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.test_compare import data as data
from tests.experiments.test_compare import small
from trainshort.common import progress as lines_module
from trainshort.data.progress import byte_bar
from trainshort.evaluation.progress import evaluation_progress
from trainshort.experiments import watching
from trainshort.experiments.compare import compare
from trainshort.experiments.watching import Board, Planned, Remaining, Watcher
from trainshort.training import TrainConfig


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(lines_module.time, "monotonic", lambda: now[0])  # the same module everywhere
    return now


def run(number: int, seed: int) -> Planned:
    return Planned(number, 12, TrainConfig(data="d", out="o", length=64, batch_tokens=64, steps=100, seed=seed))


def test_what_is_left_is_guessed_from_the_last_part(clock: list[float]) -> None:
    remaining = Remaining(10)
    assert str(remaining) == ""
    for seconds in (10, 10, 60, 60):
        clock[0] += seconds
        remaining.add(1)
    assert str(remaining) == ", about 6 min left"  # six more of 60 s
    for _ in range(6):
        remaining.add(1)
    assert str(remaining) == ""


def test_runs_at_once_say_which_they_are_and_how_long_it_takes(clock: list[float]) -> None:
    said: list[str] = []
    first, second = run(3, 1), run(4, 2)
    with Board([first, second], Watcher(say=said.append)) as board:
        clock[0] += 60.0  # processes take their time to start
        board.step(first, 0, 0.0, True)
        board.step(second, 50, 0.0, True)  # it had been interrupted: half of it is done
        for step in range(1, 33):
            clock[0] += 1.0
            board.step(first, step, 3.25, False)
        board.finished(second)
    assert said[0] == "run 3 of 12, alibi at 64, seed 1: step 16 of 100, loss 3.2500, about 2 min left in all"
    assert said[-1].startswith("run 4 of 12, alibi at 64, seed 2: trained, about ")
    assert len(said) == 3


def test_python_sees_what_happens(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(small(data, tmp_path, positions=("alibi", "none"), seeds=(0, 1)))
    shown = capsys.readouterr().err
    for text in (
        "run 1 of 4, alibi at 16, seed 0: training",
        "run 3 of 4, alibi at 16, seed 1, about",
        "run 4 of 4, none at 16, seed 1",
        "testing at 16, 32, 64",
        "step 3 of 3, loss",
    ):
        assert text in shown
    compare(small(data, tmp_path / "other", positions=("alibi",)), progress=False)
    assert capsys.readouterr().err == ""


def test_where_there_is_no_terminal_there_are_lines(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with byte_bar("tokens", 90_000_000, show=True) as advance:
        for done in range(0, 91_000_000, 1_000_000):
            clock[0] += 1.0
            advance(done)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tokens: 14.0 of 90.0 MB, about 80 s left"
    assert len(lines) == 6
    with evaluation_progress(2) as on_scored:
        for length in (16, 32):
            for _ in range(20):
                clock[0] += 1.0
                on_scored(length, 10, 200)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "length 16 (1 of 2): 150 of 200 tokens scored",
        "length 32 (2 of 2): 100 of 200 tokens scored",
    ]


def test_on_a_terminal_there_are_bars(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching.sys.stderr, "isatty", lambda: True)
    with Board([run(1, 0)], Watcher(say=lambda text: None)) as board:
        board.step(run(1, 0), 10, 3.0, False)
        (task,) = board.progress.tasks
        assert (task.description, task.completed, task.total) == ("run 1 of 12, alibi at 64, seed 0", 10, 100)
        board.finished(run(1, 0))
        assert board.progress.tasks == []
