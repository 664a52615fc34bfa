"""Settings of all tests: one thread a worker where tests run side by side, and repeatable random numbers."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("trainshort", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("trainshort")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many certificates were counted (tests/attention/test_certificates_counted.py), and the worst."""
    reports = [*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ())]
    counted = [found for found in (dict(report.user_properties) for report in reports) if "certified rows" in found]
    if counted:
        rows = sum(found["certified rows"] for found in counted)
        worst = max(found["worst share of the tolerance"] for found in counted)
        terminalreporter.write_line(f"{rows:,} query rows certified, worst share of the tolerance {worst:.6f}")
