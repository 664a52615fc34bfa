"""Several runs trained at once, each in a process of its own with its share of the cores.

Small models are trained faster by two processes with one thread each than by one with two. A stop is passed on: every
run is saved before this ends. The processes import the files with position methods that were imported here; methods
that a script has put into the table by itself they can't know.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainshort.positions import import_file
from trainshort.positions.imported import imported_files, origin_of
from trainshort.training.config import TrainConfig
from trainshort.training.run import Interrupted
from trainshort.training.stopping import StopSignals

Say = Callable[[str], None]


class Stopped(KeyboardInterrupt):
    """Asked to stop; all runs have been saved."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped, and every run is saved")
        self.status = 128 + number


class _Process:
    """One run being trained; what it writes to stderr goes to `say`, a line at a time."""

    def __init__(self, config: TrainConfig, threads: int, say: Say) -> None:
        self.name, self.last_line = Path(config.out).name, ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainshort.experiments.parallel", config.to_json(), *imported_files()],
            stderr=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
        )
        self.reader = threading.Thread(target=self._read, args=(say,), daemon=True)
        self.reader.start()

    def _read(self, say: Say) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.last_line = line.strip()
            if not self.last_line.startswith("error: "):
                say(self.last_line)

    def end(self) -> int:
        """Ask it to save and stop if it still runs, and wait until it has."""
        if self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait()
        self.reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


def train_all(configs: Sequence[TrainConfig], jobs: int, say: Say) -> None:
    """Train every run, up to `jobs` at once. The first error ends the others, saved."""
    for config in configs:
        _refuse_unknown_to_others(config.position)
    say(f"training {len(configs)} runs, {jobs} at once")
    threads = max(1, cores() // jobs)
    waiting, running = list(configs), list[_Process]()
    try:
        with StopSignals() as signals:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_Process(waiting.pop(0), threads, say))
                for each in [each for each in running if each.process.poll() is not None]:
                    if each.end() and signals.received is None:
                        raise RuntimeError(each.last_line.removeprefix("error: ") or f"training {each.name} failed")
                    running.remove(each)
                if signals.received is not None:
                    say("stopping: every run is being saved")
                    break
                time.sleep(0.05)
            number = signals.received
    finally:
        for each in running:
            each.end()
    if number is not None:
        raise Stopped(number)


def _refuse_unknown_to_others(position: str) -> None:
    module = (origin_of(position) or {}).get("module")
    if module is not None:
        raise ValueError(
            f"position {position!r} was put into the table by {module}, which other processes don't import: train "
            "one run at a time with jobs 1, or make it known with trainshort.positions.import_file (--import)"
        )


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> int:
    """The process of one run: its config, then the files to import. Errors are one line, as on the command line."""
    from trainshort.training.train import train

    try:
        for path in sys.argv[2:]:
            import_file(path)
        train(TrainConfig.from_json(sys.argv[1]), resume=True)
    except Interrupted as stop:
        return stop.status
    except Exception as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
