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
