"""Several runs trained at once, each in a process of its own with its share of the cores, and with one of the GPUs
where there are several.

Small models are trained faster by two processes with one thread each than by one with two. A stop is passed on: every
run is saved before this ends. The processes import the files with position methods that were imported here; methods
that a script has put into the table by itself they can't know.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from trainshort.common.machine import cores
from trainshort.experiments.watching import QUIET, Board, Planned, Watcher
from trainshort.positions import import_file
from trainshort.positions.imported import imported_files, origin_of
from trainshort.training.config import TrainConfig
from trainshort.training.run import Interrupted
from trainshort.training.stopping import StopSignals

STEP = "step: "  # a line of a process that says how far it is: step, loss, and whether it has begun there
STEP_EVERY = 0.5  # seconds


class Stopped(KeyboardInterrupt):
    """Asked to stop; all runs have been saved."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped, and every run is saved")
        self.status = 128 + number


class _Process:
    """One run being trained. What it writes to stderr is read line by line: progress, notes, and its error."""

    def __init__(self, run: Planned, threads: int, board: Board, gpu: str | None = None) -> None:
        """gpu: the only one that it sees, as CUDA_VISIBLE_DEVICES names it; None: it sees what this process does."""
        self.run, self.board, self.gpu, self.error = run, board, gpu, ""
        seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainshort.experiments.parallel", run.training.to_json(), *imported_files()],
            stderr=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": str(threads), **os.environ, **seen},
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith(STEP):
                step, loss, resumed = json.loads(line.removeprefix(STEP))
                self.board.step(self.run, step, loss, resumed)
            elif line.startswith("error: "):
                self.error = line.removeprefix("error: ").strip()
            else:
                self.error = line.strip()  # the last words of what was killed
                self.board.say(f"{self.run.title}: {self.error}")

    def end(self) -> int:
        """Ask it to save and stop if it still runs, and wait until it has."""
        if self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait()
        self.reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


def visible_gpus(device: str) -> list[str]:
    """What this process may spread runs over, as CUDA_VISIBLE_DEVICES names it; nothing if a run has its device."""
    if device not in ("auto", "cuda"):
        return []
    import torch

    count = torch.cuda.device_count()
    named = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def train_all(runs: Sequence[Planned], jobs: int, watcher: Watcher = QUIET, gpus: Sequence[str] = ()) -> None:
    """Train every run, up to `jobs` at once, on the GPU that has fewest. The first error ends the others, saved."""
    for run in runs:
        _refuse_unknown_to_others(run.training.position)
    over = f" on {len(gpus)} GPUs" if len(gpus) > 1 else ""
    watcher.say(f"training {len(runs)} runs, {jobs} at once{over}")
    threads = max(1, cores() // jobs)
    waiting, running = list(runs), list[_Process]()
    number = None
    try:
        with StopSignals() as signals, Board(runs, watcher) as board:
            while waiting or running:
                while waiting and len(running) < jobs:
                    gpu = _least_busy(gpus, [each.gpu for each in running])
                    running.append(_Process(waiting.pop(0), threads, board, gpu))
                for each in [each for each in running if each.process.poll() is not None]:
                    if each.end() and signals.received is None:
                        raise RuntimeError(each.error or f"training {each.run.folder} failed")
                    running.remove(each)
                    if signals.received is None:
                        board.finished(each.run)
                if signals.received is not None:
                    board.say("stopping: every run is being saved")
                    break
                time.sleep(0.05)
            number = signals.received
            for each in running:
                each.end()
    finally:
        for each in running:
            each.end()
    if number is not None:
        raise Stopped(number)


def _least_busy(gpus: Sequence[str], taken: Sequence[str | None]) -> str | None:
    """The first of those with the fewest runs; None where there is nothing to choose."""
    return min(gpus, key=list(taken).count) if len(gpus) > 1 else None


def _refuse_unknown_to_others(position: str) -> None:
    module = (origin_of(position) or {}).get("module")
    if module is not None:
        raise ValueError(
            f"position {position!r} was put into the table by {module}, which other processes don't import: train "
            "one run at a time with jobs 1, or make it known with trainshort.positions.import_file (--import)"
        )


class _Reporter:
    """Tells the parent how far a run is, now and then."""

    def __init__(self) -> None:
        self.last = -STEP_EVERY

    def __call__(self, step: int, loss: float | None) -> None:
        now = time.monotonic()
        if loss is None or now - self.last >= STEP_EVERY:
            self.last = now
            print(STEP + json.dumps([step, loss or 0.0, loss is None]), file=sys.stderr, flush=True)


def main() -> int:
    """The process of one run: its config, then the files to import. Errors are one line, as on the command line."""
    from trainshort.training.train import train

    try:
        for path in sys.argv[2:]:
            import_file(path)
        train(TrainConfig.from_json(sys.argv[1]), resume=True, on_step=_Reporter())
    except Interrupted as stop:
        return stop.status
    except Exception as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
