"""Which context is entered, if any. Of the process, not of a thread: autograd recomputes checkpoints in its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainshort.ops.context.parallel import ContextParallel

current: ContextParallel | None = None
