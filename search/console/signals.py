"""Turn Ctrl-C, SIGTERM and a closed terminal into a request to stop; the second stops at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# A system without terminals in the POSIX sense has no SIGHUP.
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
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
            if self._before.get(number) is not signal.SIG_IGN or number == signal.SIGINT:
                signal.signal(number, self._receive)  # what nohup ignores stays ignored

    def requested(self) -> bool:
        """Whether a signal came."""
        return self.received is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
