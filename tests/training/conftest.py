"""One folder of tokens for all tests of training, and a finished run to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.small import small_config, small_data
from trainshort.training.train import train


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of small_config without any interruption."""
    return train(small_config(data, tmp_path_factory.mktemp("whole") / "run"), progress=False)
