"""Turn Ctrl-C and SIGTERM into a request to stop; the second time, stop at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Handler = Callable[[int, FrameType | None], Any] | int | None


class StopSignals:
    """Catch the signals while the context is open.

    Attributes:
        received: The first signal, None as long as there was none.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[int, _Handler] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Set the handlers, again where a library has replaced them."""
        for number in _SIGNALS:
            signal.signal(number, self._receive)

    def requested(self) -> bool:
        """Whether a signal came."""
        return self.received is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
