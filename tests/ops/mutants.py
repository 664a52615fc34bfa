"""Errors put into the bounds on purpose: each one that weakens a bound must fail a check, or the check is no check.

A mutant is a piece of source text in `trainshort/ops/` and what to put in its place. The campaign copies the
package, makes the replacement, and runs the one check that the table names for it against the copy, in a process of
its own; the mutant is dead when that check fails with an AssertionError (or an ArithmeticError). A mutant that no
input can kill says why it survives instead, and is not run.

    python -m tests.ops.mutants cpu                               all of a campaign
    python -m tests.ops.mutants cpu NAME... [--checks CHECK...]   some of it, to see which checks kill it

A table is a text file, mutants_cpu.txt for one:

    == a name of its own
    dies in: a check            or    survives: why no input can tell it from the original
    @ windows.py
    - text that occurs once in that file, over as many such lines as it takes
    + what to put in its place

with more than one @ where several edits belong together. Mutants of the Triton kernels stand in mutants_triton.txt;
their checks run under the interpreter (TRITON_INTERPRET=1). Torch is imported once and the process forks for each
mutant, so nothing here may import `trainshort`.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE = Path("trainshort", "ops")
LONGEST = 120  # seconds for one mutant


class Mutant(NamedTuple):
    name: str
    edits: Sequence[tuple[str, str, str]]  # file in trainshort/ops, text that occurs once in it, replacement
    check: str = ""  # the check that it must fail
    survives: str = ""  # or why it need not


class Campaign(NamedTuple):
    table: str  # file beside this one
    checks: str  # module with CHECKS
    interpreted: bool = False  # needs TRITON_INTERPRET=1

    def mutants(self) -> list[Mutant]:
        return parse((HERE / self.table).read_text(encoding="utf-8"))


CAMPAIGNS = {
    "cpu": Campaign("mutants_cpu.txt", "tests.ops.bounds"),
    "triton": Campaign("mutants_triton.txt", "tests.ops.triton.bounds", interpreted=True),
}


def parse(table: str) -> list[Mutant]:
    """The mutants of a table; every line that is no part of one is refused, but for those before the first."""
    mutants = []
    for section in table.split("\n== ")[1:]:
        name, fate, *lines = section.strip("\n").split("\n")
        kind, _, reason = fate.partition(": ")
        if kind not in ("dies in", "survives") or not reason:
            raise ValueError(
                f"mutant {name!r}: the second line must be 'dies in: ...' or 'survives: ...', got {fate!r}"
            )
        edits: list[tuple[str, list[str], list[str]]] = []
        for line in lines:
            if line.startswith("@ "):
                edits.append((line[2:], [], []))
            elif edits and line[:1] in ("-", "+"):
                edits[-1][1 if line[0] == "-" else 2].append(line[2:])
            else:
                raise ValueError(f"mutant {name!r}: a line starts with '@ ', '-' or '+', got {line!r}")
        if not edits or not all(old and new for _, old, new in edits):
            raise ValueError(f"mutant {name!r} needs a file, and text to take out and to put in")
        whole = [(file, "\n".join(old), "\n".join(new)) for file, old, new in edits]
        mutants.append(Mutant(name, whole, reason, "") if kind == "dies in" else Mutant(name, whole, "", reason))
    return mutants


class Outcome(NamedTuple):
    name: str
    dead: bool
    said: str
    seconds: float


def applied(mutant: Mutant, root: Path = ROOT) -> dict[Path, str]:
    """The changed files, whole. Raises LookupError where the table no longer fits the source."""
    changed: dict[Path, str] = {}
    for name, text, replacement in mutant.edits:
        path = SOURCE / name
        source = changed.get(path) or (root / path).read_text(encoding="utf-8")
        if source.count(text) != 1:
            raise LookupError(
                f"mutant {mutant.name!r}: {path} holds {source.count(text)} times instead of once: {text!r}. "
                "The source has changed: change the table with it"
            )
        changed[path] = source.replace(text, replacement)
    return changed


def _judge(mutant: Mutant, checks_module: str, names: Sequence[str], folder: Path) -> tuple[bool, str]:
    """In the forked process: run the checks against a copy of the package with the error in it."""
    shutil.copytree(ROOT / "trainshort", folder / "trainshort", ignore=shutil.ignore_patterns("__pycache__"))
    for path, source in applied(mutant).items():
        (folder / path).write_text(source, encoding="utf-8")
    sys.path.insert(0, str(folder))
    package = importlib.import_module("trainshort")
    if not str(package.__file__).startswith(str(folder)):
        raise RuntimeError(f"the package under test came from {package.__file__}, not from the copy")
    checks = importlib.import_module(checks_module).CHECKS
    said = []
    for name in names or checks:
        try:
            checks[name]()
        except (AssertionError, ArithmeticError) as error:
            said.append(f"{name}: {type(error).__name__}: {str(error)[:120]}")
    return bool(said), "; ".join(said)[:4000]


def run_one(mutant: Mutant, checks_module: str, names: Sequence[str]) -> Outcome:
    """The outcome for one mutant, in a process of its own."""
    begin = time.monotonic()
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            signal.alarm(LONGEST)
            try:
                result = _judge(mutant, checks_module, names, Path(folder))
            except BaseException as error:  # everything is told: the process ends here
                result = (False, f"could not be run: {type(error).__name__}: {str(error)[:1000]}")
            os.write(writing, json.dumps(result).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
    dead, said = json.loads(told) if told else (False, f"took longer than {LONGEST} s")
    return Outcome(mutant.name, dead, said, time.monotonic() - begin)


def main(campaign_name: str, *names: str) -> int:
    campaign = CAMPAIGNS[campaign_name]
    against: tuple[str, ...] = ()
    if "--checks" in names:
        names, against = names[: names.index("--checks")], names[names.index("--checks") + 1 :]
    mutants = campaign.mutants()
    import torch

    torch.set_num_threads(1)  # a process that forks must not have threads
    chosen = [mutant for mutant in mutants if mutant.name in names] if names else [m for m in mutants if m.check]
    unknown = set(names) - {mutant.name for mutant in mutants}
    if unknown:
        raise SystemExit(f"no such mutant: {', '.join(sorted(unknown))}")
    alive = 0
    for mutant in chosen:
        outcome = run_one(mutant, campaign.checks, against if names else (mutant.check,))
        alive += not outcome.dead
        print(
            f"{'dead ' if outcome.dead else 'ALIVE'} {outcome.seconds:5.1f} s  {outcome.name}: {outcome.said}",
            flush=True,
        )
    print(f"{len(chosen)} mutants of {campaign_name}, {alive} alive")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
