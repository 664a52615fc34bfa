"""The most memory that something needed: of the GPU where the work was done there, else of this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

RESET = Path("/proc/self/clear_refs")  # writing 5 forgets the peak so far, on Linux
STATUS = Path("/proc/self/status")


class Peak:
    """`bytes` is set when the block that measured it ends."""

    bytes: int = 0


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Where the system cannot forget an earlier peak, the peak is that of the process since it began."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    with contextlib.suppress(OSError):
        RESET.write_text("5")
    yield peak
    peak.bytes = _resident_peak()


def _resident_peak() -> int:
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
