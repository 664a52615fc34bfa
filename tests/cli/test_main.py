"""The command table: help at once, errors in one sentence."""

from __future__ import annotations

import os
import pydoc
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.cli.run_cli import run_cli
from trainshort.cli import main as main_module
from trainshort.cli.arguments import Parser, add_fields, read
from trainshort.cli.errors import UsageError, name_flags
from trainshort.cli.main import COMMANDS, FIRST_STEPS, main

Capture = pytest.CaptureFixture[str]


def test_without_a_command_four_lines_get_each_kind_of_user_going(capsys: Capture) -> None:
    outcome = run_cli(capsys)
    assert outcome.status == 0
    lines = [line for line in outcome.out.splitlines() if line.startswith("  ")]
    assert len(lines) == 4
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "trainshort --help" in outcome.out
    for aim, command in FIRST_STEPS.items():
        assert any(aim in line and line.endswith(command) for line in lines)


def test_first_steps_can_be_taken() -> None:
    """Each names a command of ours, with flags that it has, or a part of the package that Python's own tools show."""
    for typed in FIRST_STEPS.values():
        program, *words = shlex.split(typed)
        if program == "trainshort":
            command = main_module._module(words[0])
            parser = Parser("trainshort", "")
            add_fields(parser, command.Flags)
            read(parser, command.Flags, words[1:])
        else:
            flag, tool, name = words
            assert (program, flag) == ("python", "-m")
            assert tool in ("pydoc", "inspect")
            assert pydoc.locate(name) is not None


@pytest.mark.parametrize("words", [["--help"], ["-h"]])
def test_help_lists_every_command(capsys: Capture, words: list[str]) -> None:
    outcome = run_cli(capsys, *words)
    assert outcome.status == 0
    assert all(name in outcome.out for name in COMMANDS)
    assert "examples:" in outcome.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_its_flags(capsys: Capture, name: str) -> None:
    outcome = run_cli(capsys, name, "--help")
    assert outcome.status == 0
    assert f"usage: trainshort {name}" in outcome.out
    few = name == "convert"  # which needs a place, and leaves little else to choose
    assert "(default: " in outcome.out
    assert "examples:" in outcome.out
    assert "--debug" in outcome.out
    flags = [line for line in outcome.out.splitlines() if line.startswith("  --")]
    assert len(flags) >= (2 if few else 5)


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_comes_at_once_and_without_torch(words: list[str]) -> None:
    code = (
        "import sys\nfrom trainshort.cli.main import main\n"
        f"status = main({words})\n"
        "heavy = {'torch', 'numpy', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(status)"
    )
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert time.perf_counter() - begin < 1.0


def test_version(capsys: Capture) -> None:
    assert run_cli(capsys, "--version").out.startswith("trainshort 0.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evalute"], "no command 'evalute'; did you mean evaluate?"),
        (["xyz"], "there are prepare, train, evaluate, compare, generate, bench"),
        (["--verison"], "no flag --verison; did you mean --version?"),
        (["evaluate", "run", "--lenghts", "512"], "no flag --lenghts; did you mean --lengths?"),
        (["evaluate", "run", "--lengths", "long"], "--lengths: must be a whole number, got 'long'"),
        (["evaluate", "run", "--lengths"], "--lengths: expected at least one argument"),
        (["evaluate", "run", "--mode", "slidin"], "got 'slidin'; did you mean sliding?"),
        (["evaluate", "run", "--stride", "1.5"], "--stride: must be a whole number or none, got '1.5'"),
        (["evaluate"], "the following arguments are required: RUN"),
        (["evaluate", "one", "two"], "unrecognized arguments: two"),
        (["generate", "run"], "the following arguments are required: --prompt"),
        (["generate", "run", "--promt", "x"], "no flag --promt; did you mean --prompt?"),
        (["compare", "--recipe", "figure2"], "did you mean figure1?"),
        (["compare", "--seed", "1"], "no flag --seed; did you mean --seeds?"),
        (["bench", "--heads", "none"], "--heads: must be a whole number, got 'none'"),
        (["train", "--data", "d", "--out", "o", "--postion", "alibi"], "no flag --postion; did you mean --position?"),
        (["prepare", "x.txt", "--ouput", "d"], "no flag --ouput; did you mean --out?"),
    ],
)
def test_what_cannot_be_understood(capsys: Capture, words: list[str], message: str) -> None:
    outcome = run_cli(capsys, *words)
    assert outcome.status == 2
    assert message in outcome.one_sentence()
    assert "--help shows" in outcome.error


TRAIN = ["train", "--data", "d", "--out", "o"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*TRAIN, "--batch-tokens", "100"],
            "--batch-tokens must be a multiple of --length x --accumulation (512 x 1)",
        ),
        ([*TRAIN, "--num-layers", "0"], "train: --num-layers must be at least 1, got 0"),
        ([*TRAIN, "--lr", "0"], "train: --lr must be positive"),
        ([*TRAIN, "--beta1", "1"], "train: --beta1 must lie in [0, 1)"),
        ([*TRAIN, "--steps", "5", "--warmup", "9"], "--warmup must be at most steps (5), got 9"),
        (["compare", "--test-lengths", "8"], "--test-lengths must have one of at least the training length 128"),
        (["compare", "--lrs", "x"], "--lrs must look like rotary=0.002"),
        (["compare", "--lrs", "none=1"], "--lrs names 'none', which is not among the positions"),
        (["prepare", "x", "--vocab", "9"], "--vocab must be at least 258"),
        (["prepare", "x", "--validation-fraction", "2"], "--validation-fraction must lie in [0, 1)"),
        (["evaluate", "x", "--batch-tokens", "0"], "--batch-tokens must be at least 1"),
        (["bench", "--head-dim", "0"], "--head-dim must be at least 1"),
    ],
)
def test_errors_name_flags_and_not_fields(capsys: Capture, words: list[str], message: str) -> None:
    assert message in run_cli(capsys, *words).one_sentence()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("choose another folder with out (--out), or remove it", "choose another folder with --out, or remove it"),
        ("made known by import_file (--import FILE.py)", "made known by --import FILE.py"),
        ("runs/batch_tokens/x has no file: batch_tokens.json", "runs/batch_tokens/x has no file: batch_tokens.json"),
        ("another run (lr was 0.1, is 0.2 now; out was 3)", "another run (--lr was 0.1, is 0.2 now; --out was 3)"),
        ("position must be one of alibi", "--positions must be one of alibi"),
        ("the lr of this out is told from data", "the lr of this out is told from data"),
    ],
)  # fmt: skip
def test_only_fields_become_flags(text: str, shown: str) -> None:
    assert name_flags(text, ["batch_tokens", "lr", "out", "data", "positions"]) == shown


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, BaseException]:
    """A command that raises what the test puts in."""
    held: dict[str, BaseException] = {}

    def fail(*_: object) -> None:
        raise held["error"]

    monkeypatch.setattr(main_module, "_run", fail)
    return held


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("lengths\n  must be   long"), "trainshort bench: --lengths must be long"),
        (KeyError("weights"), "trainshort bench: there is no 'weights' where it was looked for"),
        (FileNotFoundError(2, "No such file or directory", "book.txt"), "book.txt: no such file or directory"),
        (PermissionError(13, "Permission denied", "runs"), "runs: permission denied: choose another place"),
        (OSError(28, "No space left on device", "runs"), "no space left on the disk"),
        (
            ModuleNotFoundError("no rich.x", name="rich.x"),
            "package rich: pip install 'trainshort[lab]'",
        ),
        (ModuleNotFoundError("No module named 'chess'", name="chess"), "package chess: pip install chess"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), "not enough memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`"), "not enough memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), "not enough memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "not enough memory"),
        (ValueError("a process has died: out of memory? try fewer workers"), "a process has died: out of memory?"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero (--debug shows where)"),
        (AssertionError(), "AssertionError (--debug shows where)"),
    ],
)
def test_errors_are_one_sentence(
    capsys: Capture, failing: dict[str, BaseException], error: BaseException, message: str
) -> None:
    failing["error"] = error
    outcome = run_cli(capsys, "bench")
    assert outcome.status == 1
    assert message in outcome.one_sentence()


def test_what_was_typed_wrong_is_said_by_one_of_several_processes(
    capsys: Capture, failing: dict[str, BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is that they were stopped; any other error is told by the process that has it."""
    waited: list[float] = []
    monkeypatch.setattr("trainshort.training.launch._ends_at_once", True)
    monkeypatch.setattr(main_module.time, "sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, said in (("0", "trainshort bench: "), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert not waited
        failing["error"] = UsageError("there is no flag --x")
        outcome = run_cli(capsys, "bench")
        assert outcome.status == 2
        assert outcome.error.partition("there is no flag --x")[0] == said
        failing["error"] = KeyboardInterrupt()
        assert run_cli(capsys, "bench").error.strip().partition("stopped")[0] == said
        failing["error"] = ValueError("wrong")
        assert "wrong" in run_cli(capsys, "bench").one_sentence()
    assert waited == [main_module.SPEAKING], "or torchrun would end the one that speaks"


def test_debug_shows_where(failing: dict[str, BaseException]) -> None:
    failing["error"] = ValueError("here")
    for words in (["--debug", "bench"], ["bench", "--debug"]):
        with pytest.raises(ValueError, match="here"):
            main(words)


def test_ctrl_c_is_no_error_with_a_traceback(capsys: Capture, failing: dict[str, BaseException]) -> None:
    failing["error"] = KeyboardInterrupt()
    outcome = run_cli(capsys, "bench")
    assert outcome.status == 130
    assert outcome.error.strip() == "trainshort bench: stopped"


def test_what_an_interrupted_run_says_is_shown(capsys: Capture, failing: dict[str, BaseException]) -> None:
    stop = KeyboardInterrupt("saved at step 3; --resume goes on")
    stop.status = 143  # type: ignore[attr-defined]
    failing["error"] = stop
    outcome = run_cli(capsys, "compare")
    assert outcome.status == 143
    assert "saved at step 3" in outcome.error


def test_the_exit_status_of_a_command_is_that_of_the_program(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainshort.cli.bench import Flags

    command = SimpleNamespace(__doc__="", Flags=Flags, run=lambda flags: 7)
    monkeypatch.setattr(main_module, "_module", lambda name: command)
    assert run_cli(capsys, "bench").status == 7


def test_the_installed_program_fails_without_a_traceback() -> None:
    code = "from trainshort.cli.main import start; start()"
    result = subprocess.run([sys.executable, "-c", code, "evaluate", "nowhere"], capture_output=True, text=True)
    assert result.returncode == 1
    what = "evaluate takes one that train wrote, or a public model's"
    assert result.stderr.strip() == f"trainshort evaluate: nowhere: no such folder; {what}"


@pytest.mark.parametrize(
    ("words", "status", "out", "error"),
    [
        (["--version"], 0, "trainshort ", ""),
        (["evaluate", "nowhere"], 1, "", "no such folder"),
        (["evaluate", "nowhere", "--debug"], 1, "", "Traceback"),
    ],
)
def test_a_process_of_torchrun_ends_with_its_command(words: list[str], status: int, out: str, error: str) -> None:
    """Whatever threads a library has left running: torchrun waits for the process."""
    code = (
        "import atexit, threading, time\nfrom trainshort.cli.main import start\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\natexit.register(print, 'at exit')\nstart()"
    )
    launched = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=30, env=launched
    )
    assert result.returncode == status
    assert result.stdout.startswith(out)
    assert result.stdout.endswith("at exit\n")
    assert error in result.stderr


@pytest.mark.parametrize(
    ("breaks", "status"),
    [
        ("main.main = lambda: sys.exit(3)", 1),  # what nobody expects
        ("gone, out = os.pipe()\nos.close(gone)\nos.dup2(out, 1)", 0),
        ("gone, out = os.pipe()\nos.close(gone)\nos.dup2(out, 2)\nmain.main = lambda: 1 / 0", 1),
    ],
)
def test_whatever_happens_a_process_of_torchrun_ends(breaks: str, status: int) -> None:
    code = (
        "import atexit, os, sys, threading, time\nfrom trainshort.cli import main\n"
        f"threading.Thread(target=time.sleep, args=(60,)).start()\n{breaks}\nmain.start()"
    )
    launched = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", code, "--version"]
    assert subprocess.run(command, capture_output=True, timeout=30, env=launched).returncode == status


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m trainshort --help | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "0"
    assert result.stderr == ""
