"""Work off parts of the plan within a time limit; what is done already is not done again.

python results/run.py --list
python results/run.py short --data build/paper-data --texts build/paper-texts --limit 560 --pack build/results.tar.gz
python results/run.py short long seeds checkpoint --size rehearsal --results /tmp/rehearsed ...

Each unit of the plan (plan.py) runs its `trainshort` commands in a process of its own, --jobs units at once. Once it
is done, the small files of its runs are copied into --results, with made.json: the commands, the commit, the machine,
the seconds, and failures that are results: training that diverged, speeds for which there was not enough memory.
Parts are worked off in the order in which they are named, --only for some methods. Weights stay in --scratch and are
removed when nothing needs them any more. A unit that is not done when the time is over is lost, and no other. --pack:
one .tar.gz of all that this command made, whole at every moment, for machines from which only a file comes back; a
model that is kept is in a second one beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

from plan import (  # noqa: E402  beside this file
    BY_NAME,
    ENVIRONMENT,
    PARTS,
    SIZES,
    Places,
    Unit,
    best_rate,
    units,
)

SMALL = (
    "config.json", "train.json", "metrics.jsonl", "evaluation.json", "recall.json", "state/state.json",
    "inspection/inspection.json",
)  # fmt: skip
MADE = "made.json"
NO_MEMORY = "not enough memory"  # as the command line says it
DIVERGED, DIVERGED_SAYS = "diverged", "is too high, or the warm-up short"  # the latter as train says it
RECORDED = (*ENVIRONMENT, "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
LARGEST = 15 * 2**20  # bytes of the checkpoint that is kept


def main() -> int:
    options = _options()
    places = Places(options.data, options.texts, options.scratch)
    if len(options.parts) == 0:
        options.parts = list(PARTS)
    wanted = [unit for part in options.parts for unit in units(part, SIZES[options.size], places, options.only)]
    if options.unit is not None:
        every = [unit for part in PARTS for unit in units(part, SIZES[options.size], places)]
        return _work(next(unit for unit in every if unit.name == options.unit), options)
    if options.list:
        return _show(wanted, options.results)
    _check(places)
    return _Runner(wanted, options).run()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = f"of {', '.join(PARTS)}, worked off as they are named; by default all"
    parser.add_argument("parts", nargs="*", metavar="PART", help=parts)
    parser.add_argument("--only", nargs="+", default=[], metavar="METHOD", help=f"of {', '.join(BY_NAME)}")
    parser.add_argument("--data", default="build/paper-data", help="the folder that trainshort prepare wrote")
    parser.add_argument("--texts", default="build/paper-texts", help="the folder of the texts to test on")
    parser.add_argument("--scratch", default="build/paper-runs", help="for weights, which are not kept")
    parser.add_argument("--results", type=Path, default=HERE, help="where results are, and new ones go")
    parser.add_argument("--pack", type=Path, help="a .tar.gz for all that this command makes")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--jobs", type=int, default=1, help="units at once, on one GPU too")
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    parser.add_argument("--list", action="store_true", help="say what is done and what is left")
    parser.add_argument("--unit", help=argparse.SUPPRESS)  # in the process of one unit
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: there are {', '.join(PARTS)}")
    if unknown := [name for name in options.only if name not in BY_NAME]:
        parser.error(f"there is no method {unknown[0]!r}: there are {', '.join(BY_NAME)}")
    options.commit = options.commit or _commit()
    return options


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", HERE, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../trainshort", ".")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _check(places: Places) -> None:
    for path in (Path(places.data) / "meta.json", Path(places.texts)):
        if not path.exists():
            raise SystemExit(f"{path} is not there: results/README.md says how it is made")
    if not places.books:
        raise SystemExit(f"{places.texts} holds no book beside WikiText-103's validation set: see results/README.md")


def is_done(unit: Unit, results: Path) -> bool:
    return all((results / name / MADE).exists() for name in unit.folders)


def _show(wanted: Sequence[Unit], results: Path) -> int:
    guess = Guess(results)
    for unit in wanted:
        state = "done" if is_done(unit, results) else f"about {guess.seconds(unit):.0f} s"
        print(f"{unit.name:<50}{state}")
    left = sum(guess.seconds(unit) for unit in wanted if not is_done(unit, results))
    print(f"{left / 60:.0f} minutes are left, one unit after the other")
    return 0


class Guess:
    """How long a unit takes: as long as the slowest of its kind did so far, else as the plan says."""

    def __init__(self, results: Path) -> None:
        self.known: dict[str, float] = {}
        for path in results.glob(f"*/*/{MADE}"):
            made = json.loads(path.read_text())
            self.add(made["kind"], made["seconds"])

    def add(self, kind: str, seconds: float) -> None:
        self.known[kind] = max(seconds, self.known.get(kind, 0.0))

    def seconds(self, unit: Unit) -> float:
        return self.known.get(unit.kind, unit.seconds)


@dataclass
class _Running:
    unit: Unit
    process: subprocess.Popen[bytes]
    log: Path
    began: float


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask first: a run that is being trained saves itself, which a machine that is kept has something of."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Runner:
    def __init__(self, wanted: Sequence[Unit], options: argparse.Namespace) -> None:
        self.options, self.results = options, Path(options.results)
        self.waiting = [unit for unit in wanted if not is_done(unit, self.results)]
        self.running: list[_Running] = []
        self.failed: list[str] = []
        self.made: list[str] = []  # folders, for the pack
        self.guess = Guess(self.results)
        self.began = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> int:
        print(f"{len(self.waiting)} units to do", flush=True)
        before = signal.signal(signal.SIGTERM, _stop)  # so that nobody's units go on without them
        try:
            while self.running or self._next() is not None:
                self._start_what_fits()
                self._end_what_is_done()
                if self.elapsed > self.options.limit:
                    print("the time is over", flush=True)
                    break
                time.sleep(0.1)
        finally:
            signal.signal(signal.SIGTERM, before)
            for each in self.running:
                _end(each.process)
                print(f"{each.unit.name}: stopped, and lost", flush=True)
        left = len(self.waiting) + len(self.running)
        print(f"{self.elapsed:.0f} s: {left} units are left, {len(self.failed)} failed {self.failed}", flush=True)
        if blocked := [unit.name for unit in self.waiting if not self._has_needs(unit)]:
            print(f"{len(blocked)} of those wait for tries that are not done, which the part short makes", flush=True)
        return int(bool(self.failed))

    def _next(self) -> Unit | None:
        """The first whose needs are there and that has time enough, if there is room for it beside the others."""
        if len(self.running) >= self.options.jobs or any(each.unit.alone for each in self.running):
            return None
        for unit in self.waiting:
            if self._has_needs(unit) and self.elapsed + self.guess.seconds(unit) <= self.options.limit:
                return None if unit.alone and self.running else unit
        return None

    def _has_needs(self, unit: Unit) -> bool:
        return all((self.results / name / MADE).exists() for name in unit.needs)

    def _start_what_fits(self) -> None:
        while (unit := self._next()) is not None:
            self.waiting.remove(unit)
            options = self.options
            words = [sys.executable, str(HERE / "run.py"), "--unit", unit.name, "--size", options.size]
            for name in ("data", "texts", "scratch", "results", "commit"):
                words += [f"--{name}", str(getattr(options, name))]
            log = Path(options.scratch) / "logs" / (unit.name.replace("/", "_") + ".txt")
            log.parent.mkdir(parents=True, exist_ok=True)
            environment = {**os.environ, **ENVIRONMENT, "PAPER_JOBS": str(1 if unit.alone else options.jobs)}
            with log.open("wb") as file:
                process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)
            self.running.append(_Running(unit, process, log, time.monotonic()))

    def _end_what_is_done(self) -> None:
        for each in [each for each in self.running if each.process.poll() is not None]:
            self.running.remove(each)
            seconds, name = time.monotonic() - each.began, each.unit.name
            if each.process.returncode:
                self.failed.append(name)
                tail = each.log.read_text(errors="replace")[-2000:]
                print(f"{self.elapsed:.0f} s: {name} failed after {seconds:.0f} s:\n{tail}", flush=True)
                continue
            print(f"{self.elapsed:.0f} s: {name} done in {seconds:.0f} s", flush=True)
            self.guess.add(each.unit.kind, seconds)
            self.made += each.unit.folders
            if self.options.pack is not None:
                self._pack()

    def _pack(self) -> None:
        """What was made so far; a model in a file of its own, which is large enough without the rest."""
        models = [name for name in self.made if (self.results / name / "model").exists()]
        pack: Path = self.options.pack
        pack.parent.mkdir(parents=True, exist_ok=True)
        packs = {
            pack: [name for name in self.made if name not in models],
            pack.with_name(f"model-{pack.name}"): models,
        }
        for path, names in packs.items():
            if not names:
                continue
            partial = path.with_name("partial-" + path.name)
            with tarfile.open(partial, "w:gz") as file:
                for name in names:
                    file.add(self.results / name, arcname=name)
            os.replace(partial, path)


def _work(unit: Unit, options: argparse.Namespace) -> int:
    """The process of one unit: its commands one after another, then its files into the results."""
    from trainshort.cli.main import main as trainshort

    began, done, failed = time.monotonic(), list[list[str]](), list[dict[str, Any]]()
    scratch, results = Path(options.scratch), Path(options.results)
    _take_over(unit, scratch, results)
    for command in unit.commands(results):
        print("trainshort " + " ".join(command), flush=True)
        with _errors() as errors:
            status = trainshort(command)
        said = errors.read_text(errors="replace")
        errors.unlink()
        print(said, flush=True)
        done.append(["trainshort", *command])
        if status == 0:
            continue
        if (error := _is_a_result(unit, command, said)) is None:
            return status
        failed.append({"command": command, "error": error})
        _free()
        if error == DIVERGED:
            break  # there is nothing to test
    made = {
        "unit": unit.name,
        "kind": unit.kind,
        "seconds": round(time.monotonic() - began, 1),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": options.commit,
        "jobs": int(os.environ.get("PAPER_JOBS", "1")),
        "machine": _machine(),
        "environment": {name: os.environ[name] for name in RECORDED if name in os.environ},
        "commands": done,
        "failed": failed,
    }
    if unit.publishes:
        _keep_checkpoint(scratch / unit.name, results / unit.name / "model")
    for name in unit.folders:
        _collect(scratch / name, results / name, made)
    _clean_up(unit, scratch)
    return 0


def _is_a_result(unit: Unit, command: Sequence[str], said: str) -> str | None:
    """Why a command failed, where that is a finding to keep; None where it should be mended."""
    if unit.alone and NO_MEMORY in said:
        return NO_MEMORY
    return DIVERGED if unit.diverges and command[0] == "train" and DIVERGED_SAYS in said else None


@contextmanager
def _errors() -> Iterator[Path]:
    """What is written to stderr inside, in a file: all of it, whoever wrote it."""
    path = Path(f"/tmp/paper-errors-{os.getpid()}")
    sys.stderr.flush()
    saved = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield path
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


def _free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _machine() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "python": platform.python_version(), "torch": torch.__version__}


def _take_over(unit: Unit, scratch: Path, results: Path) -> None:
    """The weights of the best try, if they are still there: the same run need not be trained again."""
    if unit.tries and not (scratch / unit.name).exists():
        best = scratch / unit.tries[best_rate(unit.tries, results)]
        if (best / "model.safetensors").exists():
            partial = scratch / f"{unit.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(best, partial)
            os.replace(partial, scratch / unit.name)


def _collect(run: Path, target: Path, made: dict[str, Any]) -> None:
    """The small files of a run, and made.json at the very end."""
    for name in SMALL:
        if (run / name).exists():
            place = target / Path(name).name if name.startswith("inspection") else target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run / name, place)
    if made["jobs"] > 1 and (target / "metrics.jsonl").exists():
        _leave_out_mfu(target / "metrics.jsonl")
    target.mkdir(parents=True, exist_ok=True)
    partial = target / f".{MADE}"
    partial.write_text(json.dumps(made, indent=1) + "\n")
    os.replace(partial, target / MADE)


def _leave_out_mfu(path: Path) -> None:
    """Of a run that shared its GPU with others: the share of the GPU that it used says nothing."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name != "mfu"} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def _clean_up(unit: Unit, scratch: Path) -> None:
    if unit.keeps:  # until its best is tested: the state of the optimizer is twice as large as the weights
        return
    for name in (*unit.folders, *(unit.needs if unit.tries else ())):
        shutil.rmtree(scratch / name, ignore_errors=True)


def _keep_checkpoint(run: Path, target: Path) -> None:
    """The model alone, in 16 bits: config.json, tokenizer.json, model.safetensors and what it was trained with."""
    import torch

    import trainshort as ts

    model = ts.load(run, dtype=torch.bfloat16)
    ts.save(model, target)
    shutil.copyfile(run / "train.json", target / "train.json")
    size = (target / "model.safetensors").stat().st_size
    if size > LARGEST:
        raise SystemExit(f"{target}: the weights take {size:,} bytes, more than {LARGEST:,}")


if __name__ == "__main__":
    sys.exit(main())
