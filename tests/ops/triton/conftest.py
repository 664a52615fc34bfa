"""Triton's interpreter: every kernel runs on the CPU, in a process of its own with TRITON_INTERPRET=1 (`make test`).

Windows are looked for at any length here, not only where they pay. The interpreter's time goes by the number of
tiles: float32 has as large ones as 16 bits, and decoding has four splits of the keys instead of 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ops.triton.interpreter import quick_tiles
from trainshort.ops import INTERPRETED
from trainshort.ops.triton import shapes

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # NumPy warns where the kernels reckon with infinities on purpose.
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
            if not INTERPRETED:
                item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 from the start: see `make test`"))


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
