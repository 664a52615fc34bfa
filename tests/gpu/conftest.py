"""Tests that need a GPU: skipped without one, split into shards, their results written down one by one.

`scripts/test_gpu.py` runs the shards side by side. A test marked `alone` wants the whole GPU to itself. Results go
to a file as they come, so that a crash hides none of them, and a second run of the shard goes on behind the crash.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="i/n: the i-th of n parts (from 0) of tests/gpu; alone: those that need it all")
    parser.addoption(
        "--results", help="a file of JSON lines: every test's start and outcome; what it names is not run"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: needs most of the GPU's memory")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        # Torch deprecates parts of itself that its own compiler uses.
        item.add_marker(pytest.mark.filterwarnings("default", "error:::trainshort"))
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU: see `make test-gpu`"))
    shard, results = config.getoption("shard", None), config.getoption("results", None)
    dropped: list[pytest.Item] = []
    if shard == "alone":
        dropped = [item for item in mine if item.get_closest_marker("alone") is None]
    elif shard:
        index, count = (int(number) for number in shard.split("/"))
        together = [item for item in mine if item.get_closest_marker("alone") is None]
        dropped = [item for item in mine if item not in together[index::count]]
    if results and Path(results).exists():
        done = {json.loads(line)["test"] for line in Path(results).read_text().splitlines()}
        dropped += [item for item in mine if item.nodeid in done and item not in dropped]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def _write(config: pytest.Config, **fields: object) -> None:
    path = config.getoption("results", None)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(fields) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if HERE in item.path.parents and (report.when == "call" or report.outcome != "passed"):
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
    if HERE in item.path.parents:
        _write(item.config, test=item.nodeid, outcome="started")


@pytest.fixture(autouse=True)
def _give_memory_back():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
