"""Which tokens are fed and which are scored: every token of the span exactly once, whatever the length and stride.

Places count predictions: place p is the prediction of token p + 1 from the tokens up to p. A window feeds the places
[start, end) and scores those from `scored` on. The first token of a text is never predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    start: int
    scored: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def skipped(self) -> int:
        """Places at its start that are context alone."""
        return self.scored - self.start


def windows(first: int, last: int, length: int, stride: int) -> Iterator[Window]:
    """Windows that score the places [first, last): each scores its last `stride` of `length` places.

    With stride = length they lie side by side. Where a window would begin before the text it begins with it, and
    scores all that fits: in causal attention later places change nothing for earlier ones.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"stride must lie in [1, length], got stride {stride} and length {length}")
    scored = first
    while scored < last:
        start = max(0, scored + stride - length)
        end = scored + stride if start else max(scored + stride, length)
        end = min(end, last)
        yield Window(start, scored, end)
        scored = end


def scored_span(
    tokens: int, lengths: Sequence[int], *, limit: int | None = None, lead: int = 0, to_the_end: bool = False
) -> tuple[int, int]:
    """The places that every length scores, of a text of this many tokens: whole windows of the longest length.

    limit: at most this many places. lead: places before the first, as context. to_the_end: where there is no limit,
    score the rest as well, in a shorter window, so that other tokenizers score the same text.
    """
    if tokens == 0:
        raise ValueError(
            "the split to be scored holds no text: prepare the data again with more text, with a larger "
            "validation_fraction (--validation-fraction), or with texts for validation (--validation)"
        )
    longest = max(lengths)
    count = tokens - 1 - lead
    if limit is not None:
        count = min(count, limit)
    if count < 1 or lead + count < longest:
        what = f"{tokens:,} tokens" if limit is None or limit > tokens else f"the {limit:,} tokens to be scored"
        raise ValueError(
            f"{what} are too few for windows of {longest:,} tokens and the one that comes after: "
            "choose shorter lengths, or score more text"
        )
    if count >= longest and not (to_the_end and limit is None):
        count -= count % longest
    return lead, lead + count
