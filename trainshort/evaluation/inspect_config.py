"""What to inspect: how much of a text, at which lengths, with which tolerance. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainshort.common.checks import is_finite, is_int
from trainshort.common.settings import Settings

FORMAT, VERSION = "trainshort inspection", 1
NAME = "inspection.json"
TOKENS = 4096  # of a text that are looked at unless more are asked for


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Settings):
    """Checked when it is made."""

    tokens: int | None = field(
        default=None,
        metadata={
            "help": f"of the text at most; the time grows with their square (default: {TOKENS}, or the longest of "
            "--lengths)"
        },
    )
    lengths: tuple[int, ...] = field(
        default=(),
        metadata={"help": "count visited keys at these lengths too (default: 128, 256, ... up to the text's)"},
    )
    tolerance: float | None = field(
        default=None,
        metadata={
            "help": "of a query's softmax, the most that may be skipped (default: 2^-14 for 16-bit models, 2^-24 for "
            "float32, 0 for float64)"
        },
    )
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = field(
        default=None, metadata={"help": "of the model (default: as it was saved)"}
    )
    device: str | None = field(
        default=None, metadata={"help": "such as cpu or cuda (default: cuda where there is one)"}
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))
        for name, value in (("tokens", self.tokens), *(("lengths", length) for length in self.lengths)):
            if not (is_int(value) and value >= 1) and not (name == "tokens" and value is None):
                raise ValueError(f"{name} must be at least 1, as a whole number; got {value!r}")
        if self.tokens is not None and self.lengths and self.lengths[-1] > self.tokens:
            raise ValueError(
                f"lengths must be at most tokens, the {self.tokens:,} that are read; got {self.lengths[-1]:,}"
            )
        if self.tolerance is not None and not (is_finite(self.tolerance) and 0 <= self.tolerance < 1):
            raise ValueError(f"tolerance must lie in [0, 1), got {self.tolerance!r}")

    @property
    def most_tokens(self) -> int:
        return max(TOKENS, *self.lengths, 1) if self.tokens is None else self.tokens
