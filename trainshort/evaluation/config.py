"""What to evaluate: at which lengths, in which windows, on how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainshort.common.checks import is_int
from trainshort.common.settings import Settings

BLOCK = 128  # attention works in blocks of this many keys
MODES = ("nonoverlapping", "sliding")
ATTENTION = ("auto", "dense")
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Settings):
    """Checked when it is made. Every length scores exactly the same tokens, each once."""

    lengths: tuple[int, ...] = field(
        default=(),
        metadata={"help": "tokens in a window, one or more (default: 1, 2, 4, 8 and 16 x the trained length)"},
    )
    mode: Literal["nonoverlapping", "sliding"] = field(
        default="nonoverlapping",
        metadata={"help": "windows side by side, or overlapping so that early tokens have context"},
    )
    stride: int | None = field(
        default=None,
        metadata={"help": "tokens that each sliding window scores, its last ones (default: half its length)"},
    )
    split: Literal["validation", "train"] = field(
        default="validation", metadata={"help": "part of prepared data to score"}
    )
    tokens: int | None = field(
        default=None,
        metadata={
            "help": "score at most this many tokens, in whole windows of the longest length (default: all there are)"
        },
    )
    lead: int = field(
        default=0, metadata={"help": "tokens before the first scored one, as context for sliding windows"}
    )
    chunk: int = field(
        default=8192, metadata={"help": "longer windows are computed in parts of this size, with the cache"}
    )
    batch_tokens: int = field(default=8192, metadata={"help": "tokens of short windows that are computed together"})
    attention: Literal["auto", "dense"] = field(
        default="auto",
        metadata={
            "help": "dense: a table of all scores, as before fused kernels, of windows that are never cut into parts"
        },
    )
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = field(
        default=None, metadata={"help": "of the model (default: as it was saved)"}
    )
    device: str | None = field(
        default=None, metadata={"help": "such as cpu or cuda (default: cuda where there is one)"}
    )
    kept: bool = field(
        default=True, metadata={"help": "record which keys certified windows keep, where there are such"}
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(dict.fromkeys(self.lengths)))
        for length in self.lengths:
            self._at_least("lengths", length, 1)
        for name, least in (("chunk", 1), ("batch_tokens", 1), ("lead", 0)):
            self._at_least(name, getattr(self, name), least)
        for name in ("stride", "tokens"):
            if getattr(self, name) is not None:
                self._at_least(name, getattr(self, name), 1)
        if self.chunk % BLOCK:
            raise ValueError(f"chunk must be a multiple of {BLOCK}, got {self.chunk}")
        choices = {"mode": MODES, "split": ("validation", "train"), "dtype": (*DTYPES, None), "attention": ATTENTION}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                listed = ", ".join(str(each) for each in allowed)
                raise ValueError(f"{name} must be one of {listed}; got {getattr(self, name)!r}")
        if self.stride is not None and self.mode == "nonoverlapping":
            raise ValueError("stride is for mode sliding: nonoverlapping windows move by their whole length")
        if self.stride is not None and self.lengths and self.stride > min(self.lengths):
            raise ValueError(
                f"stride must be at most the shortest length, {min(self.lengths)}, or tokens would never be scored; "
                f"got {self.stride}"
            )

    @staticmethod
    def _at_least(name: str, value: object, least: int) -> None:
        if not is_int(value) or value < least:
            raise ValueError(f"{name} must be at least {least}, as a whole number; got {value!r}")

    def stride_of(self, length: int) -> int:
        """How far a window of this length moves, and so how many tokens it scores."""
        if self.mode == "nonoverlapping":
            return length
        return max(1, length // 2) if self.stride is None else self.stride

    def chunk_of(self, length: int) -> int:
        """The most tokens of a window of this length that are computed at once: dense attention cuts none."""
        return max(self.chunk, length) if self.attention == "dense" else self.chunk
