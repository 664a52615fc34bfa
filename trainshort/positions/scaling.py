"""Texts longer than those of the training: by what factor a method is to be stretched for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Scaling(NamedTuple):
    """How a method is stretched, and by how much."""

    kind: str  # "none", or as the method has them
    factor: float | None = None  # by this; None: by the length of the text over trained_length, if that is above 1
    trained_length: int | None = None

    @property
    def depends_on_length(self) -> bool:
        return self.kind != "none" and self.factor is None

    def at(self, length: int) -> float:
        """The factor for a text of this many tokens."""
        if self.kind == "none" or self.factor is not None:
            return self.factor or 1.0
        assert self.trained_length is not None
        return max(1.0, length / self.trained_length)

    def check(self, method: str, kinds: Sequence[str], need_trained_length: Sequence[str] = ()) -> Scaling:
        """The same, or an error that says what cannot be."""
        if self.kind != "none" and self.kind not in kinds:
            raise ValueError(f"{method} scaling must be one of none, {', '.join(kinds)}; got {self.kind!r}")
        if self.kind == "none" and (self.factor is not None or self.trained_length is not None):
            raise ValueError(f"{method} factor and trained_length belong to a scaling: {', '.join(kinds)}")
        if self.factor is not None and not self.factor > 0:
            raise ValueError(f"{method} factor must be positive, got {self.factor}: it is the test over train length")
        missing = self.trained_length is None
        if missing and self.kind != "none" and (self.factor is None or self.kind in need_trained_length):
            what = (
                "trained_length" if self.kind in need_trained_length else "a factor, or trained_length to find it by"
            )
            raise ValueError(f"{method} scaling {self.kind!r} needs {what}")
        return self
