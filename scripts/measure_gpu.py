"""Run the GPU's tests and benchmarks one after another, each in a process and with a limit of its own.

    python3 scripts/measure_gpu.py --out FOLDER [--parts tests:bounded decay models:decoding] [--limit SECONDS]

A part is `tests`, or a benchmark, with a colon and its own parts where only some are to run:
`models:decoding,prefill` in one process, `models:decoding models:prefill` in two. `tests:bounded,decay` are those
files of tests/gpu, `tests:contract` is a sample of tests/ops/contract. `--list` names all, with their limits in
seconds; `models=300` sets one.

Whatever a part gives lies in the folder as soon as it exists: its result, and its output as PART.log. The results of
several processes on one machine and of the same code become one file, like that of one process: models_gpu.json.
A part that fails or takes too long is ended, and the next one begins for which there is time enough. A second call
into the same folder adds to it, runs of the tests only what has not passed before, and compiles nothing again: the
caches of Triton and of torch's compiler lie there too. The exit status is 0 if every part that was asked for is done.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENDING = 15.0  # seconds before a part's limit, at which the tests stop by themselves and write their log
LEAST = 5.0  # seconds with which no test begins
ENOUGH = 0.5  # of its limit, with which a benchmark's part begins: with less it would be cut short, without a result
TOLD = 100  # characters of an error


@dataclass(frozen=True)
class Kind:
    """What can be asked for by one name."""

    script: str
    limits: dict[str, int]  # seconds, by the names of its own parts; "" for one that has none
    result: str  # the name of its result, without its ending
    arguments: Callable[[Sequence[str]], list[str]]  # for these parts of it


def _named(parts: Sequence[str]) -> list[str]:
    return ["--parts", *parts]


def _test_files(parts: Sequence[str]) -> list[str]:
    places = {"all": ["tests/gpu", "tests/ops/contract"], "contract": ["tests/ops/contract", "--sample"]}
    return [word for part in parts for word in places.get(part, [f"tests/gpu/test_{part}.py"])]


# Limits are one and a half times what a part took on an H200 (at db0ef9f), or, where it did not run there, some one
# and a half times what its lengths and repeats should take.
KINDS = {
    "tests": Kind("scripts/test_gpu.py", {"all": 580, "contract": 240}, "test_gpu", _test_files),
    "attention": Kind(
        "benchmarks/attention_gpu.py",
        {"errors": 90, "records": 240, "decoding": 60, "trained": 120, "buckets": 120},
        "attention_gpu",
        _named,
    ),
    "decay": Kind("benchmarks/decay_gpu.py", {"training": 83, "decoding": 40}, "decay_gpu", _named),
    "models": Kind(
        "benchmarks/models_gpu.py",
        {
            "training": 282,
            "fox": 150,
            "mfu": 150,
            "first_step": 105,
            "decoding": 290,
            "seven_b": 62,
            "prefill": 30,  # after decoding, with which it compiles the same: 302 together
            "bounded": 218,
        },
        "models_gpu",
        _named,
    ),
    "public": Kind(
        "benchmarks/public_gpu.py", {"bloom": 53, "mpt": 75, "decoding": 66, "compiled": 150}, "public_gpu", _named
    ),
    "distributed": Kind(
        "benchmarks/distributed.py", {"": 191}, "distributed_gpu", lambda parts: ["cuda", "--repeats", "1"]
    ),
    "context": Kind("benchmarks/context_parallel.py", {"": 60}, "context_parallel_gpu", lambda parts: ["--gpu"]),
}
DEFAULT = ["tests", *(f"{name}:{part}".rstrip(":") for name in list(KINDS)[1:] for part in KINDS[name].limits)]


@dataclass
class Part:
    """One process to run."""

    name: str  # as it was asked for
    kind: Kind
    parts: list[str]
    limit: float
    least: float  # seconds with which it does not begin
    seconds: float = 0.0
    state: str = "not started"
    error: str = ""


def parsed(asked: str) -> Part:
    """A part by its name, such as "models:decoding,prefill=300"."""
    name, _, limit = asked.partition("=")
    kind_name, _, rest = name.partition(":")
    kind = KINDS.get(kind_name)
    if kind is None:
        raise SystemExit(f"there is no part {kind_name!r}: choose from {', '.join(KINDS)}, or see --list")
    parts = rest.split(",") if rest else list(kind.limits)[:1] if kind_name == "tests" else list(kind.limits)
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    allowed = set(kind.limits) | (files if kind_name == "tests" else set())
    unknown = [part for part in parts if part not in allowed]
    if unknown:
        raise SystemExit(f"{kind_name} has no part {unknown[0]!r}: choose from {', '.join(sorted(allowed))}")
    seconds = float(limit) if limit else float(sum(kind.limits.get(part, 120) for part in parts))
    least = LEAST if kind_name == "tests" else ENOUGH * min(seconds, kind.limits.get(parts[0], seconds))
    return Part(name, kind, parts, seconds, least)


def command_of(part: Part, out: Path, limit: float, commit: str) -> list[str]:
    """What is run, with where its result goes."""
    command = [sys.executable, str(ROOT / part.kind.script), *part.kind.arguments(part.parts)]
    result = result_of(part, out)
    if part.kind is KINDS["tests"]:
        command += ["--log", str(result), "--limit", str(max(limit - ENDING, limit / 2)), "--commit", commit]
        whole = out / f"{part.kind.result}.txt"
        return [*command, "--again", str(whole)] if whole.exists() else command
    command += ["--out", str(result)]
    return [*command, "--commit", commit] if '"--commit"' in Path(command[1]).read_text() else command


def result_of(part: Part, out: Path) -> Path:
    """The file of one process; what it is merged into has the name of the kind's result alone."""
    ending = "txt" if part.kind is KINDS["tests"] else "json"
    return out / f"{part.name.replace(':', '.').replace(',', '+')}.result.{ending}"


def run(part: Part, out: Path, caches: Path, end: float, commit: str) -> None:
    """Run a part until it is done, or its limit or that of all is over."""
    limit = min(part.limit, end - time.monotonic())
    if limit < part.least:
        part.error = f"{max(0.0, limit):.0f} s were left, and it begins with {part.least:.0f}"
        return
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    log, began = out / f"{part.name.replace(':', '.').replace(',', '+')}.log", time.monotonic()
    result_of(part, out).unlink(missing_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command_of(part, out, limit, commit), cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit)
            part.state = "ok" if status == 0 else "failed"
        except subprocess.TimeoutExpired:
            part.state = "out of time"
        except BaseException:  # somebody ends this script
            part.state = "stopped"
            raise
        finally:
            end_group(process)
            part.seconds = time.monotonic() - began
            if part.state != "ok":
                part.error = last_line(log)
            merge(part, out)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Let nothing of a part go on: it would take time and memory from the next one."""
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 30.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def last_line(log: Path) -> str:
    """Where a program says what went wrong: the last line that is not empty, or the last that names an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines[-40:] if "Error" in line.split(":")[0]]
    return (named or lines or ["it said nothing"])[-1][:TOLD]


def merge(part: Part, out: Path) -> None:
    """Add what a process found to the file of all of its kind; what was cut off replaces nothing that is longer."""
    found = result_of(part, out)
    if not found.exists():
        return
    if part.kind is KINDS["tests"]:
        (out / f"{part.kind.result}.txt").write_text(found.read_text())
        return
    whole = out / f"{part.kind.result}.json"
    try:
        new = json.loads(found.read_text())
    except ValueError:  # it was ended while it wrote
        part.error = part.error or f"{found.name} is cut off"
        return
    old = json.loads(whole.read_text()) if whole.exists() else {}
    if alike(old.get("about", {}), new.get("about", {})):
        cut = {name for name, found in new.items() if part.state != "ok" and len(found) < len(old.get(name, ()))}
        new = {**old, **{name: found for name, found in new.items() if name not in cut}}
    whole.write_text(json.dumps(new, indent=1) + "\n")


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether results are of one machine and the same code, whatever the commit."""
    return {**one, "commit": ""} == {**other, "commit": ""}


def table(parts: Sequence[Part]) -> str:
    width = max(len(part.name) for part in parts)
    rows = [f"{'part':<{width}}  seconds  outcome      the last error"]
    rows += [f"{part.name:<{width}}  {part.seconds:7.0f}  {part.state:<11}  {part.error}".rstrip() for part in parts]
    return "\n".join(rows)


def commit_now() -> str:
    with suppress(OSError):  # no git here
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        return asked.stdout.strip() or "unknown"
    return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the folder for results, logs and caches")
    parser.add_argument("--parts", nargs="+", default=DEFAULT, help="in this order (default: all; see --list)")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all parts together (default: 3600)")
    parser.add_argument("--caches", type=Path, help="where compiled kernels are kept (default: OUT/caches)")
    parser.add_argument("--commit", help="what is measured, for the results (default: ask git)")
    parser.add_argument("--list", action="store_true", help="name all parts with their limits")
    options = parser.parse_args()
    parts = [parsed(name) for name in options.parts]
    if options.list:
        print("\n".join(f"{part.name}={part.limit:.0f}" for part in parts))
        return 0
    if options.out is None:
        parser.error("--out FOLDER is needed: where results and logs go")
    out = options.out.resolve()
    caches = (options.caches or out / "caches").resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.limit
    commit = options.commit or commit_now()
    # Parts have sessions of their own: they would outlive this script, and keep the GPU busy.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for part in parts:
        try:
            run(part, out, caches, end, commit)
        finally:
            (out / "summary.txt").write_text(table(parts) + "\n")
        print(f"{part.name}: {part.state} after {part.seconds:.0f} s {part.error}".rstrip(), flush=True)
    print(table(parts))
    return 0 if all(part.state == "ok" for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
