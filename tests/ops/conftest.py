"""Settings of the tests of attention.

Where the Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1, a process of its own), windows are looked
for at any length, not only where they pay. The interpreter's time goes by the number of tiles: float32 has as large
ones as 16 bits, and decoding has four splits of the keys instead of 64.
"""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of tests that run side by side wait without spinning

import pytest
import torch

from tests.ops.cases import windows_whatever_they_cost
from tests.ops.triton.interpreter import quick_tiles
from trainshort.ops import INTERPRETED
from trainshort.ops.triton import shapes

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if INTERPRETED else ():
        if HERE in item.path.parents:
            # NumPy warns where the kernels reckon with infinities on purpose.
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(autouse=True)
def _windows() -> Iterator[None]:
    with windows_whatever_they_cost():
        yield


@pytest.fixture(autouse=True)
def _short_and_quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    from trainshort.ops.triton import launch

    monkeypatch.setattr(shapes, "SHORTEST", 1)
    monkeypatch.setattr(launch, "MOST_SPLITS", 4)
    with quick_tiles(dtypes=(torch.float32,)):
        yield
