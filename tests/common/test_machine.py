"""A figure that was measured on a loaded machine says so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainshort.common import machine
from trainshort.common.machine import LOADED, Waiting, in_words


def thread(folder: Path, number: int, ran: int, waited: int) -> None:
    (folder / str(number)).mkdir(exist_ok=True)
    (folder / str(number) / "schedstat").write_text(f"{ran} {waited} 7\n")


def test_the_share_is_of_what_came_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TASKS", tmp_path)
    thread(tmp_path, 1, 1000, 9000)
    waiting = Waiting()
    thread(tmp_path, 1, 1300, 9100)
    thread(tmp_path, 2, 300, 100)
    (tmp_path / "3").mkdir()  # a thread that has just ended
    assert waiting.share() == 0.25


@pytest.mark.parametrize(("load", "share"), [(0.0, 0.0), (2.0, 0.0), (8.0, 0.75)])
def test_elsewhere_the_load_average_has_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, share: float
) -> None:
    monkeypatch.setattr(machine, "TASKS", tmp_path / "nothing")
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert Waiting().share() == share


def test_only_loaded_machines_are_worth_a_word() -> None:
    assert in_words(None) == in_words(0.0) == in_words(LOADED) == ""
    assert in_words(0.305) == ", on a loaded machine: its threads waited for a core 30% of the time"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count waiting")
def test_neighbours_on_the_same_core_are_noticed() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nprint('busy', flush=True)\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    before = os.sched_getaffinity(0)
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        os.sched_setaffinity(0, [core])
        waiting, end = Waiting(), time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
        share = waiting.share()
        assert share is not None
        assert share > LOADED
    finally:
        os.sched_setaffinity(0, before)
        for other in others:
            other.kill()
            other.wait()
            assert other.stdout is not None
            other.stdout.close()
