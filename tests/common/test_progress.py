"""Times left, the pace they are guessed from, and bars where there is a terminal."""

from __future__ import annotations

import sys

import pytest

from trainshort.common.progress import Pace, StepBars, time_left


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.1, "1 s"), (31, "30 s"), (240, "4 min"), (3000, "50 min"), (9000, "2.5 h")]
)
def test_times_are_rounded(seconds: float, text: str) -> None:
    assert time_left(seconds) == f"about {text} left"


def test_the_pace_is_that_of_the_last_seconds() -> None:
    pace = Pace(0, 100.0, recent=10.0)
    now, found = 100.0, 0.0
    for step in range(1, 101):  # a fast beginning: 0.1 s a step
        now += 0.1
        found = pace.add(step, now)
    assert found == pytest.approx(0.1)
    for step in range(101, 141):  # then slow: 0.5 s a step, for 20 s
        now += 0.5
        found = pace.add(step, now)
    assert found == pytest.approx(0.5)  # since the start it would be 0.21


def test_a_step_that_takes_longer_than_that_counts_alone() -> None:
    pace = Pace(0, 0.0, recent=10.0)
    pace.add(1, 1.0)
    assert pace.add(2, 61.0) == pytest.approx(60.0)
    assert pace.add(3, 91.0) == pytest.approx(30.0)


def test_a_pace_is_unknown_until_something_is_done() -> None:
    pace = Pace(5, 0.0, recent=10.0)
    assert pace.seconds is None
    assert pace.add(5, 1.0) is None
    assert pace.add(6, 2.0) == 2.0


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with StepBars(show=True) as bars:
        assert bars.shown
        bars.set_bar("first", 3, 10, "loss 2")
        bars.set_bar("second", 1, 5)
        bars.set_bar("first", 4, 10, "loss 1")
        tasks = [
            (task.description, task.completed, task.total, task.fields["figures"]) for task in bars.progress.tasks
        ]
        assert tasks == [("first", 4, 10, "loss 1"), ("second", 1, 5, "")]
        bars.remove_bar("first")
        bars.remove_bar("first")
        bars.say("a line above the bars")
        assert [task.description for task in bars.progress.tasks] == ["second"]
    assert "a line above the bars" in capsys.readouterr().err
    assert not bars.progress.live.is_started


@pytest.mark.parametrize(("show", "terminal"), [(True, False), (False, True)])
def test_no_bars_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], show: bool, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with StepBars(show=show) as bars:
        assert not bars.shown
        bars.set_bar("first", 3, 10)
        bars.remove_bar("first")
    assert capsys.readouterr().err == ""
