"""A plugin of pytest for scripts/test_gpu.py: several processes share the tests, and write results down one by one.

Each process takes the longest run of tests that nobody has taken yet, until none is left. Those marked `alone` are a
shard of their own. Results go to a file as they come, so that a crash hides none of them, and a second start of the
process goes on behind the crash.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

# How many cases of a test at most stay in one run, and the seconds of one that the log does not have. Those of the
# contract share compiled kernels; those of tests/gpu are long.
TOGETHER = {"tests/gpu/": 1, "tests/ops/contract/": 12}
UNKNOWN = {"tests/gpu/": 8.0, "tests/ops/contract/": 2.0}
LOG = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "test_gpu.txt"
RUNS = pytest.StashKey[list[list[pytest.Item]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", help="alone: the tests that need the GPU to themselves; any other name: of the others"
    )
    parser.addoption("--taken", help="a folder: for each run of tests a file with the name of the shard that took it")
    parser.addoption("--without", help="a log of scripts/test_gpu.py: what passed or was skipped there is not run")
    parser.addoption(
        "--results", help="a file of JSON lines: every test's start and outcome; what it names is not run"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard, results = config.getoption("shard"), config.getoption("results")
    without = lines_of(Path(config.getoption("without")), "passed|skipped") if config.getoption("without") else {}
    kept = [item for item in items if item.nodeid not in without]
    if shard:
        kept = [item for item in kept if (item.get_closest_marker("alone") is not None) == (shard == "alone")]
    # The same runs in every process, and at every start of it.
    config.stash[RUNS] = longest_first(kept) if shard else [kept]
    if results and Path(results).exists():
        done = {json.loads(line)["test"] for line in Path(results).read_text().splitlines()}
        kept = [item for item in kept if item.nodeid not in done]
    left = set(kept)
    if len(left) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = kept


def longest_first(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests in runs of cases of one test at one place, by the times of the last log."""
    times = lines_of(LOG, "passed") if LOG.exists() else {}
    tests = defaultdict(list)
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        tests[item.nodeid.partition("[")[0], str(parameters.get("place"))].append(item)
    runs = []
    for (name, _), cases in tests.items():
        folder = next(each for each in TOGETHER if name.startswith(each))
        for first in range(0, len(cases), TOGETHER[folder]):
            run = cases[first : first + TOGETHER[folder]]
            runs.append((sum(times.get(item.nodeid, UNKNOWN[folder]) for item in run), run))
    return [run for _, run in sorted(runs, key=lambda pair: -pair[0])]


def lines_of(log: Path, outcomes: str) -> dict[str, float]:
    """The tests of a log with these outcomes (a regular expression), and their seconds."""
    matches = (re.match(rf"(?:{outcomes}) +([\d.]+)s  (.*?)(?:  |$)", line) for line in log.read_text().splitlines())
    return {match[2]: float(match[1]) for match in matches if match}


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    shard, taken = config.getoption("shard"), config.getoption("taken")
    if not taken or config.option.collectonly or session.testsfailed:
        return None
    left = set(session.items)
    for index, run in enumerate(config.stash[RUNS]):
        if not take(Path(taken) / str(index), shard):
            continue
        cases = [item for item in run if item in left]
        for item, following in zip(cases, [*cases[1:], None], strict=True):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return True


def take(run: Path, shard: str) -> bool:
    """Whether this shard has the run: nobody has it yet, or it took it before it crashed."""
    with suppress(FileExistsError), run.open("x") as file:
        file.write(shard)
    return run.read_text() == shard


def _write(config: pytest.Config, **fields: object) -> None:
    path = config.getoption("results")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(fields) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        message = "" if report.outcome == "passed" else str(report.longrepr)[-3000:]
        told = {name: value for name, value in item.user_properties if isinstance(value, (int, float))}
        seconds = report.duration
        _write(item.config, test=item.nodeid, outcome=report.outcome, seconds=seconds, message=message, numbers=told)
        if report.outcome == "failed" and torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except Exception:  # this process has lost its GPU: nothing after it would mean anything
                os._exit(99)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _write(item.config, test=item.nodeid, outcome="started")
