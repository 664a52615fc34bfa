"""Every test of this folder runs at each place that this process can be asked for: see places.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.contract.places import Place, parametrize

HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)  # behind a test's own parameters, so that neighbours differ in the place
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        parametrize(metafunc)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that has no place in this process is no test of it."""
    homeless = [
        item
        for item in items
        if HERE in item.path.parents
        and isinstance(item, pytest.Function)
        and not isinstance(item.callspec.params.get("place"), Place)
    ]
    if homeless:
        config.hook.pytest_deselected(items=homeless)
        items[:] = [item for item in items if item not in homeless]
