"""SIGTERM in any stage: one sentence that says what is done and how to go on, and the exit status of a signal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run_cli import run_cli
from tests.distributed.launched import pretend_launched
from tests.report.made import make_run
from trainshort.evaluation import evaluate as evaluate_module

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def terminated_at(call: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but the process gets a SIGTERM in its call number `call`."""
    calls = [0]

    def function(*inputs: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*inputs, **more)

    return function


@pytest.fixture(autouse=True)
def _left_as_it_was() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


def stopped(capsys: Capture, *words: object) -> str:
    outcome = run_cli(capsys, *words)
    assert outcome.status == 128 + signal.SIGTERM, outcome.error
    assert "Traceback" not in outcome.error
    return outcome.error.strip().splitlines()[-1]


def test_prepare(capsys: Capture, tmp_path: Path, monkeypatch: Patch) -> None:
    import trainshort.data.prepare as module

    (tmp_path / "book.txt").write_text("some words " * 100)
    words = ["prepare", tmp_path / "book.txt", "--out", tmp_path / "data"]
    monkeypatch.setattr(module, "_meta", terminated_at(1, module._meta))
    told = stopped(capsys, *words)
    assert "holds no data yet: the same command starts again from the beginning" in told
    monkeypatch.undo()
    assert run_cli(capsys, *words).status == 0
    before = (tmp_path / "data" / "tokens.bin").read_bytes()
    monkeypatch.setattr(module, "_meta", terminated_at(1, module._meta))
    assert "is whole and as it was before" in stopped(capsys, *words, "--overwrite")
    assert (tmp_path / "data" / "tokens.bin").read_bytes() == before
    assert not list((tmp_path / "data").glob(".*"))


def test_work_that_python_cannot_interrupt(tmp_path: Path) -> None:
    """Such as training a tokenizer: said all the same, and soon."""
    (tmp_path / "book.txt").write_text("some words " * 100)
    code = f"""
import hashlib, sys
import trainshort.data.prepare as module
from trainshort.cli import stopping
from trainshort.cli.main import main

def deaf(*inputs, **more):
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 10**9)  # minutes, outside of Python

stopping.GRACE = 0.2
module._meta = deaf
sys.exit(main(["prepare", {str(tmp_path / "book.txt")!r}, "--out", {str(tmp_path / "data")!r}]))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "busy\n"
            process.send_signal(signal.SIGTERM)
            _, error = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert error.strip().endswith("holds no data yet: the same command starts again from the beginning")


def test_a_command_ends_before_processes_that_it_forked() -> None:
    """They have copies of whatever pipes it had opened."""
    code = """
import os, time
from trainshort.cli.stopping import terminable
with terminable("train"):
    if not os.fork():
        time.sleep(60)
os._exit(0)
"""
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        try:
            assert process.wait(timeout=30) == 0
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("launched", [False, True])
def test_evaluate(capsys: Capture, untrained: Path, tmp_path: Path, launched: bool, monkeypatch: Patch) -> None:
    if launched:
        pretend_launched(monkeypatch)
    run = shutil.copytree(untrained, tmp_path / "run")
    monkeypatch.setattr(evaluate_module, "_at_length", terminated_at(3, evaluate_module._at_length))
    shared = ["--context-parallel", "--device", "cpu"] if launched else []
    told = stopped(capsys, "evaluate", run, "--lengths", 32, 64, 128, 256, "--tokens", 600, *shared)
    assert f"32, 64 is done and in {run / 'evaluation.json'}" in told
    assert "go on with --lengths 128 256 --tokens 512 and the other flags as they were" in told


def test_compare(capsys: Capture, prepared: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    words = ["compare", "--data", prepared, "--out", tmp_path / "out", "--positions", "alibi", "none", "--length", 16]
    words += ["--steps", 2, "--batch-tokens", 64, "--num-layers", 1, "--d-model", 16, "--num-heads", 2]
    words += ["--multiples", 1, 2, "--test-tokens", 64, "--device", "cpu"]
    monkeypatch.setattr(evaluate_module, "_at_length", terminated_at(4, evaluate_module._at_length))
    told = stopped(capsys, *words)
    assert f"{tmp_path / 'out'}: stopped with 1 of 2 runs trained and tested; the same compare goes on" in told
    monkeypatch.undo()
    monkeypatch.setattr("trainshort.report.figures.drawn", terminated_at(1, lambda chart, dots: iter(())))
    told = stopped(capsys, *words)
    assert f"all runs are done: trainshort report {tmp_path / 'out'} --out" in told


def test_train_before_its_first_step(capsys: Capture, prepared: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    import trainshort.training.processes as module

    monkeypatch.setattr(module, "device_for", terminated_at(1, module.device_for))
    words = ["train", "--data", prepared, "--out", tmp_path / "run", "--length", 16, "--batch-tokens", 64]
    words += ["--num-layers", 1, "--d-model", 16, "--num-heads", 2, "--steps", 3, "--device", "cpu"]
    told = stopped(capsys, *words)
    assert "stopped and saved at step 1 of 3; --resume goes on from there" in told


def test_report(capsys: Capture, tmp_path: Path, monkeypatch: Patch) -> None:
    import trainshort.report.build as module

    make_run(tmp_path / "alibi")
    monkeypatch.setattr(module, "content_of", terminated_at(1, module.content_of))
    words = ["report", tmp_path / "alibi", "--out", tmp_path / "report", "--no-figures"]
    assert "there is no page yet: the same command makes it again" in stopped(capsys, *words)
    monkeypatch.undo()
    assert run_cli(capsys, *words).status == 0
    monkeypatch.setattr(module, "content_of", terminated_at(1, module.content_of))
    assert "report.html is as it was before" in stopped(capsys, *words)


def test_bench_shows_and_keeps_what_was_measured(capsys: Capture, tmp_path: Path, monkeypatch: Patch) -> None:
    import trainshort.experiments.bench as module

    monkeypatch.setattr(module, "measure", terminated_at(3, module.measure))
    out = tmp_path / "bench.json"
    words = ["bench", "--lengths", 64, 128, 256, "--heads", 2, "--head-dim", 16, "--tokens", 256, "--seconds", 0.01]
    outcome = run_cli(capsys, *words, "--out", out)
    assert outcome.status == 128 + signal.SIGTERM
    assert [line.split()[2] for line in outcome.out.splitlines()[2:]] == ["64", "128"]
    assert f"stopped; 2 of 3 lengths were measured, and are in {out}" in outcome.error
    assert out.exists()
