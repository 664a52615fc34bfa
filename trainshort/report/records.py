"""Values as files hold them, which may be anything, and records that say what they are of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainshort.common.checks import LARGEST_EXACT, is_finite, is_whole

Values = dict[str, Any]


def whole(value: Any) -> int | None:
    return value if is_whole(value, -LARGEST_EXACT) else None


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return float(value) if is_finite(value) else None


def mapping(value: Any) -> Values:
    return value if isinstance(value, dict) else {}


def with_weights(model: str, records: list[Any]) -> list[Any]:
    """Files of version 1 named the weights once, and no dtype where a length was skipped: that of the others is."""
    dtypes = {str(each["dtype"]) for each in records if isinstance(each, dict) and "dtype" in each}
    known = {"model": model} | ({"dtype": dtypes.pop()} if len(dtypes) == 1 else {})
    return [known | each if isinstance(each, dict) else each for each in records]


def is_identified(record: Values) -> bool:
    texts = all(isinstance(record.get(name), str) for name in ("model", "data", "split", "dtype"))
    first, end = whole(record.get("first_token")), whole(record.get("end_token"))
    return texts and first is not None and end is not None and 0 <= first < end


def is_recall(record: Values) -> bool:
    """Whether it says what it is of, and how many answers were right at each depth, or why there are none."""
    texts = all(isinstance(record.get(name), str) for name in ("model", "data", "split", "task", "dtype"))
    sizes = [whole(record.get(name)) for name in ("length", "trials", "choices")]
    depths = record.get("depths")
    if not texts or any(size is None or size < 1 for size in sizes) or not isinstance(depths, list) or not depths:
        return False
    if isinstance(record.get("skipped"), str):
        return True
    counts = record.get("correct")
    return (
        isinstance(counts, list)
        and len(counts) == len(depths)
        and all(whole(depth) is not None for depth in depths)
        and all(is_whole(count, 0) and count <= record["trials"] for count in counts)
    )


def cells(records: Iterable[Values]) -> str:
    """`nonoverlapping at 64, 128`, of a few records."""
    lengths: dict[str, dict[int, None]] = {}
    for each in records:
        lengths.setdefault(each["mode"], {})[each["length"]] = None
    return "; ".join(f"{mode} at {', '.join(f'{each:,}' for each in found)}" for mode, found in lengths.items())
