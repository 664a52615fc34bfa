"""One cache for all that is kept from call to call: checked calls, configurations, and launches. Needs no Triton."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any


class Cache:
    """A dict of at most `most` entries: the least recently used makes room for a new one.

    An entry carries the time of its last use, so that a hit costs one lookup (an OrderedDict would hash a long key
    twice), and only making room looks at all entries.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: dict[Hashable, list[Any]] = {}  # value, and when it was last used
        self._time = 0
        self._writing = threading.Lock()

    def get(self, key: Hashable) -> Any:
        """None if it is not there."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._time = entry[1] = self._time + 1
        return entry[0]

    def put(self, key: Hashable, value: Any) -> Any:
        with self._writing:
            if key not in self._entries and len(self._entries) >= self.most:
                del self._entries[min(self._entries, key=lambda other: self._entries[other][1])]
            self._time += 1
            self._entries[key] = [value, self._time]
        return value

    def clear(self) -> None:
        with self._writing:
            self._entries.clear()

    def items(self) -> list[tuple[Any, Any]]:
        return [(key, entry[0]) for key, entry in list(self._entries.items())]


# Keys begin with what their values are: "call", "config", "forward", "backward", "decode", "append" or "rotate". A
# shape that a model is trained on has one of each of the first four: there is room for some 500 shapes.
CACHE = Cache(2048)
