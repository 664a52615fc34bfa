"""A plugin of pytest for scripts/test_gpu.py: tests in shards, their results written down one by one.

The script runs the shards side by side, those marked `alone` after them. Results go to a file as they come, so that a
crash hides none of them, and a second run of the shard goes on behind the crash.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator
from itertools import groupby
from pathlib import Path

import pytest
import torch

# How many neighbours stay in one shard. Those of the contract share compiled kernels; those of tests/gpu are long.
TOGETHER = {"tests/gpu/": 1, "tests/ops/contract/": 6}
LOG = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "test_gpu.txt"
UNKNOWN = 2.0  # seconds of a test that the log does not have


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="i/n: the i-th of n parts (from 0) of the tests; alone: those that need it all")
    parser.addoption("--without", help="a log of scripts/test_gpu.py: what passed or was skipped there is not run")
    parser.addoption(
        "--results", help="a file of JSON lines: every test's start and outcome; what it names is not run"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard, results = config.getoption("shard"), config.getoption("results")
    without = lines_of(Path(config.getoption("without")), "passed|skipped") if config.getoption("without") else {}
    kept = [item for item in items if item.nodeid not in without]
    if shard == "alone":
        kept = [item for item in kept if item.get_closest_marker("alone") is not None]
    elif shard:
        index, count = (int(number) for number in shard.split("/"))
        parts = runs([item for item in kept if item.get_closest_marker("alone") is None])
        kept = [item for part in even(parts, count)[index] for item in part]
    if results and Path(results).exists():
        done = {json.loads(line)["test"] for line in Path(results).read_text().splitlines()}
        kept = [item for item in kept if item.nodeid not in done]
    dropped = set(items) - set(kept)
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = kept


def runs(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests in runs that stay together."""
    found = []
    for folder, group in groupby(items, lambda item: next(f for f in TOGETHER if item.nodeid.startswith(f))):
        members, most = list(group), TOGETHER[folder]
        found += [members[first : first + most] for first in range(0, len(members), most)]
    return found


def lines_of(log: Path, outcomes: str) -> dict[str, float]:
    """The tests of a log with these outcomes (a regular expression), and their seconds."""
    matches = (re.match(rf"(?:{outcomes}) +([\d.]+)s  (.*?)(?:  |$)", line) for line in log.read_text().splitlines())
    return {match[2]: float(match[1]) for match in matches if match}


def even(parts: list[list[pytest.Item]], count: int) -> list[list[list[pytest.Item]]]:
    """The runs in shards that take about as long, by the times of the last log: longest first, to whom has least."""
    times = lines_of(LOG, "passed") if LOG.exists() else {}
    loads = sorted(
        ((sum(times.get(item.nodeid, UNKNOWN) for item in part), part) for part in parts), key=lambda t: -t[0]
    )
    shards: list[list[list[pytest.Item]]] = [[] for _ in range(count)]
    taken = [0.0] * count
    for seconds, part in loads:
        least = taken.index(min(taken))
        shards[least].append(part)
        taken[least] += seconds
    return shards


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
