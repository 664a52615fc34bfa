"""Start processes with torchrun, and read what they leave. One start serves many cases: torch loads for seconds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds, after which a job counts as stuck; one that lost a process has to end within 60
JOB = "TRAINSHORT_TEST_JOB"  # in the environment of all processes of a job: its name


@dataclass(frozen=True)
class Ended:
    status: int
    errors: str
    seconds: float

    @property
    def sentences(self) -> list[str]:
        """What trainshort itself said was wrong."""
        own = ("trainshort train: ", "trainshort evaluate: ")
        return [line for line in self.errors.splitlines() if line.startswith(own)]


def torchrun(processes: int, *words: str, restarts: int = 0, **environment: str) -> Ended:
    """What they write goes into files: whoever still holds one of them keeps nobody waiting."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    job = str(uuid.uuid4())
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        began = time.monotonic()
        with (
            out.open("w") as to_out,
            errors.open("w") as to_errors,
            subprocess.Popen(
                [*command, f"--max-restarts={restarts}", "-m", *words],
                env={**os.environ, **own, **environment, JOB: job},
                stdout=to_out,
                stderr=to_errors,
            ) as started,
        ):
            try:
                status = started.wait(LIMIT)
                seconds = time.monotonic() - began
            except subprocess.TimeoutExpired:
                where = where_it_is(job, out, errors)
                raise AssertionError(f"still running after {LIMIT} seconds:\n{where}") from None
            finally:
                _end(job, signal.SIGKILL)
                started.kill()
        return Ended(status, errors.read_text(errors="replace"), seconds)


def where_it_is(job: str, *files: Path) -> str:
    """End a job that is stuck. What it wrote, and where each of its processes was, by thread."""
    written = dict.fromkeys(files)
    for process in processes_of(job):  # ranks other than 0 write into their logs
        with contextlib.suppress(OSError):
            written[Path(os.readlink(f"/proc/{process}/fd/2"))] = None
    _end(job, signal.SIGABRT, patience=2)  # Python's faulthandler tells all threads
    _end(job, signal.SIGKILL)
    return "\n".join(f"{path}:\n{path.read_text(errors='replace')}" for path in written if path.is_file())


def _end(job: str, number: int, patience: float = 0.0) -> None:
    """Send a signal to the processes of a job, one after the other, and wait so many seconds for each to end."""
    for process in processes_of(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
        end = time.monotonic() + patience
        while time.monotonic() < end and process in processes_of(job):
            time.sleep(0.05)


def processes_of(job: str) -> list[int]:
    """What is left of torchrun, its ranks and what these have started; torchrun first, which would end the rest."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if f"{JOB}={job}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return sorted(found)


def pretend_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started this process, and no other."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    about = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in about.items():
        monkeypatch.setenv(name, str(value))


@contextlib.contextmanager
def folder_of_all_workers(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """One folder for all workers that run tests of a file side by side; one of them at a time is in here."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def run_cases(processes: int, cases: list[dict[str, Any]], folder: Path) -> list[list[Any]]:
    """What each case of tests/distributed/worker.py gives on each rank."""
    asked = folder / f"cases-{processes}.json"
    asked.write_text(json.dumps(cases))
    ended = torchrun(processes, "tests.distributed.worker", str(asked))
    assert ended.status == 0, ended.errors[-4000:]
    by_rank = [json.loads((folder / f"{asked.name}.{rank}").read_text()) for rank in range(processes)]
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]
