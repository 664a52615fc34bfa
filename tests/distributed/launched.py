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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds, after which a job counts as stuck; one that lost a process has to end within 60


@dataclass(frozen=True)
class Ended:
    status: int
    errors: str
    seconds: float

    @property
    def sentences(self) -> list[str]:
        """What trainshort itself said was wrong."""
        return [line for line in self.errors.splitlines() if line.startswith("trainshort train: ")]


def torchrun(processes: int, *words: str, restarts: int = 0, **environment: str) -> Ended:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONFAULTHANDLER": "1"}
    began = time.monotonic()
    job = subprocess.Popen(
        [*command, f"--max-restarts={restarts}", "-m", *words],
        env={**os.environ, **own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = job.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still running after {LIMIT} seconds:\n{_where_it_is(job)}") from None
    return Ended(job.returncode, errors, time.monotonic() - began)


def _where_it_is(job: subprocess.Popen[str]) -> str:
    """End a job that is stuck. What it wrote, and where each of its processes was, by thread."""
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    for process in (job.pid, *ranks):  # torchrun first: it would end the others
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGABRT)  # Python's faulthandler tells all threads
            time.sleep(1)  # one after the other
    job.kill()
    return "".join(job.communicate())


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
