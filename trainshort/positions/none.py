"""No position method: only the causal mask tells a model about order."""

from __future__ import annotations

from trainshort.positions.position import Position, Shape


class NoPosition(Position):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
