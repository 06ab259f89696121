"""Workers that outlast a search, so that the next budget's search finds them loaded."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

from search.workers.pool import Pool


class Workers:
    """Start workers when a search first needs some, and end them with the context."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def get(self, start: Callable[[], Pool]) -> Pool:
        """Give the workers, started if there are none; to close them is left to the context."""
        if self._pool is None:
            self._pool = start()
        return cast(Pool, _Kept(self._pool))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.close()


class _Kept:
    """A pool that a driver cannot close.

    A driver that ends without an error has no trial running; after an error no search follows.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def close(self) -> None:
        """Keep the workers."""
