"""That no test waits for processes without end, nor leaves any behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launched import JOB, processes_of, where_it_is

# A rank whose torchrun has gone.
ORPHAN = """
import subprocess, sys
print("started", flush=True)
code = "import time; print('here', flush=True); time.sleep(60)"
with open(sys.argv[1], "w") as log:
    subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log).stdout.readline()
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_a_job_that_is_stuck_ends_and_tells_where_it_was(tmp_path: Path) -> None:
    out, log, job = tmp_path / "out", tmp_path / "log", f"test of {tmp_path}"
    environment = {**os.environ, JOB: job, "PYTHONFAULTHANDLER": "1"}
    with out.open("w") as file:
        subprocess.run([sys.executable, "-c", ORPHAN, str(log)], env=environment, stdout=file, check=True, timeout=30)
    assert len(processes_of(job)) == 1
    told = where_it_is(job, out)
    assert "started" in told
    assert 'File "<string>", line 1 in <module>' in told
    assert processes_of(job) == []
