"""The campaign of mutants: every error that weakens a bound is noticed by the check that holds it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.ops.mutants import CAMPAIGNS, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="each mutant runs in a forked process"),
]


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_every_mutant_dies(campaign: str) -> None:
    """About a second a mutant, in one process and its children."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if CAMPAIGNS[campaign].interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "tests.ops.mutants", campaign]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    alive = [line for line in done.stdout.splitlines() if line.startswith("ALIVE")]
    assert not alive, "no check noticed:\n" + "\n".join(alive)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    print(done.stdout.splitlines()[-1])
