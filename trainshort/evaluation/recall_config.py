"""What to ask a model to recall: at which lengths and depths, how often, among how many answers. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainshort.common.checks import is_int
from trainshort.common.settings import Settings
from trainshort.evaluation.config import BLOCK, DTYPES

CUE = 8  # tokens
ANSWER = {"passkey": 4, "copy": 16}  # tokens


@dataclass(frozen=True, kw_only=True)
class RecallConfig(Settings):
    """Checked when it is made."""

    lengths: tuple[int, ...] = ()
    depths: tuple[int, ...] = field(
        default=(0, 25, 50, 75, 100),
        metadata={"help": "where the answer stands, in percent of the window: 0 is its start"},
    )
    trials: int = field(default=50, metadata={"help": "windows at each length and depth"})
    choices: int = field(default=8, metadata={"help": "answers to choose among: chance is right once in so many"})
    seed: int = field(default=0, metadata={"help": "of the drawing of windows, cues and answers"})
    split: Literal["validation", "train"] = "validation"
    chunk: int = 8192
    batch_tokens: int = 8192
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("lengths", "depths"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        least = {"trials": 1, "choices": 2, "seed": 0, "chunk": 1, "batch_tokens": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if not is_int(value) or value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, as a whole number; got {value!r}")
        if self.chunk % BLOCK:
            raise ValueError(f"chunk must be a multiple of {BLOCK}, got {self.chunk}")
        if not self.depths or not all(is_int(depth) and 0 <= depth <= 100 for depth in self.depths):
            raise ValueError(f"depths must be whole percentages from 0 to 100, one or more; got {self.depths!r}")
        if self.dtype not in (*DTYPES, None):
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        for length in self.lengths:
            if not is_int(length) or length < shortest_window():
                raise ValueError(
                    f"lengths for recall must be at least {shortest_window()}, so that the cue and the answer fit "
                    f"into the window twice; got {length!r}"
                )


def shortest_window() -> int:
    """With no filler at all."""
    return 2 * (CUE + max(ANSWER.values())) - 1
