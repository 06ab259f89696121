"""Turn Ctrl-C, SIGTERM and a closed terminal into a request to stop; the second stops at once.

The second signal raises KeyboardInterrupt in the main thread, so that Ray and the store are closed
as always. Python drops an exception that is raised in a finaliser or in a callback from C, and
raises none while C code does not return, or sleeps if the signal came just before. A thread sees to
that: it signals again until the exception is on its way, and ends the process if that is still
there `GRACE_SECONDS` later, or at a third signal.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

GRACE_SECONDS = 15.0
"""From the second signal on, for what closes Ray and the store."""

_AGAIN_SECONDS = 0.2  # between two looks at whether the exception is on its way
_SHOW_CURSOR = b"\x1b[?25h"  # which a live view has hidden

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
        self._raised = False

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self._hook_before = sys.unraisablehook
        sys.unraisablehook = self._note_dropped
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # Python writes each signal's number there at once, whatever the main thread is doing.
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._watch = threading.Thread(
            target=_watch, args=(reader, self._insist), name="stop signals", daemon=True
        )
        self._watch.start()
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
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()  # which ends the thread
        self._watch.join()
        sys.unraisablehook = self._hook_before

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
            self._raised = True
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def _note_dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        if self._raised and issubclass(dropped.exc_type, KeyboardInterrupt):
            self._raised = False
        else:
            self._hook_before(dropped)

    def _insist(self) -> bool:
        """Signal the main thread unless KeyboardInterrupt is on its way; say whether it did."""
        main = threading.main_thread().ident
        if self._raised or main is None:
            return False
        signal.pthread_kill(main, signal.SIGINT)
        return True


def _watch(reader: socket.socket, insist: Callable[[], bool]) -> None:
    """Make sure that the second signal, or the third, ends the process.

    Args:
        reader: Gives a byte per signal, its number; closed when there is nothing to watch any more.
        insist: Sends the main thread a signal if it must, and says whether it has.
    """
    with reader:
        first = second = None
        while second is None:
            byte = reader.recv(1)
            if not byte:
                return
            if byte[0] in _SIGNALS:
                first, second = (byte[0], None) if first is None else (first, byte[0])
        reader.settimeout(_AGAIN_SECONDS)
        deadline, ours = time.monotonic() + GRACE_SECONDS, 0
        while time.monotonic() < deadline:
            try:
                byte = reader.recv(1)
            except TimeoutError:
                ours += insist()
                continue
            if not byte:
                return
            if byte[0] in _SIGNALS:
                if not ours:
                    break
                ours -= 1
        assert first is not None
        _end(first)


def _end(number: int) -> None:
    """End this process without asking Python, and with it Ray's, which watch for that."""
    with suppress(OSError):
        restored = _SHOW_CURSOR if os.isatty(2) else b""
        os.write(2, restored + b"Stopped at once; the same command goes on.\n")
    os._exit(128 + number)
