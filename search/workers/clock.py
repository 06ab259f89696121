"""Count the time that a loop was awake, for deadlines that a suspended process may not miss."""

from __future__ import annotations

import time

LONGEST_GAP_SECONDS = 5.0
"""Of a longer pause between two looks, which a suspended laptop or a stopped process makes, no more
than this counts: in the rest of it nobody could have heard of anything."""


class AwakeClock:
    """A clock that stands still while nobody looks at it. It starts at 0."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked = time.monotonic()

    def look(self) -> float:
        """Give the seconds so far."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, LONGEST_GAP_SECONDS)
        self._looked = now
        return self._seconds
