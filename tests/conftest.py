"""Settings of all tests: one thread a worker where tests run side by side, repeatable random numbers, what a GPU
needs, and which cases of the long tables `make test` runs: a sample, and `make test-all` the others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("trainshort", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("trainshort")

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Of the cases of one test, `make test` runs the first and every so many after it. Triton's interpreter is slow.
SAMPLED = {
    "ops": 32 if INTERPRETED else 6,
    "models/test_compile.py": 8,
    "models/public/test_convert.py": 4,
    "models/test_overfit.py": 4,
    "models": 2,
    "training": 3,
    "integrations": 13,
}
FEWEST = 1 if INTERPRETED else 3  # cases: shorter tables are run whole
# In the interpreter `make test-all` runs one case of so many; `make test-interpreter` and, on a GPU, `make
# test-gpu` run all.
THINNED = {"ops": 3}
# On a GPU those of the blocked backend, which is torch and runs whole on a CPU; `pytest -m gpu` runs all.
THINNED_ON_GPU = {"ops": 4}
# The same on a GPU, for `scripts/test_gpu.py --sample`.
SAMPLED_ON_GPU = {"ops": 5}

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests for a GPU (all of tests/gpu, and tests/ops/contract at places on one), and what is not in the sample
    as slow."""
    on_gpu: list[pytest.Item] = []
    elsewhere: list[pytest.Item] = []
    for item in (item for item in items if HERE in item.path.parents):
        if HERE / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") is None:
            elsewhere.append(item)
            continue
        on_gpu.append(item)
        # Torch deprecates parts of itself that its own compiler uses.
        item.add_marker(pytest.mark.filterwarnings("default", "error:::trainshort"))
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU: see `make test-gpu`"))
    _mark(elsewhere, SAMPLED, pytest.mark.slow)
    _mark(on_gpu, SAMPLED_ON_GPU, pytest.mark.slow)
    _mark([item for item in on_gpu if item.name.endswith("blocked_gpu]")], THINNED_ON_GPU, pytest.mark.exhaustive)
    if INTERPRETED:
        _mark(elsewhere, THINNED, pytest.mark.exhaustive)


def _mark(items: list[pytest.Item], sampled: dict[str, int], mark: pytest.MarkDecorator) -> None:
    """Mark the cases that a sample leaves out."""

    def name(item: pytest.Item) -> tuple[Path, str]:
        return item.path, item.name.partition("[")[0]

    counts, seen = Counter(name(item) for item in items), Counter[tuple[Path, str]]()
    for item in items:
        place = item.path.relative_to(HERE).as_posix()
        step = next((step for folder, step in sampled.items() if place.startswith(folder)), 1)
        if counts[name(item)] > FEWEST and seen[name(item)] % step:
            item.add_marker(mark)
        seen[name(item)] += 1


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _give_memory_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.node.get_closest_marker("gpu") is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many certificates were counted (tests/ops/test_certificates_counted.py), and the worst."""
    reports = [*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ())]
    counted = [found for found in (dict(report.user_properties) for report in reports) if "certified rows" in found]
    if counted:
        rows = sum(found["certified rows"] for found in counted)
        worst = max(found["worst share of the tolerance"] for found in counted)
        terminalreporter.write_line(f"{rows:,} query rows certified, worst share of the tolerance {worst:.6f}")
