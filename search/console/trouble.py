"""Tell the person of trouble with the store, which is waited for, and let them end the wait."""

from __future__ import annotations

from collections.abc import Callable

import click


def _say(text: str) -> None:
    click.echo(text, err=True)


class StoreTrouble:
    """A listener of `PatientStorage`.

    Args:
        stop_error: Raised when the wait should end.

    Attributes:
        say: Shows a line.
        stop_requested: Whether the wait should end.
    """

    def __init__(self, stop_error: type[Exception]) -> None:
        self._stop_error = stop_error
        self.say: Callable[[str], None] = _say
        self.stop_requested: Callable[[], bool] = lambda: False
        self._told: str | None = None

    def __call__(self, trouble: str | None) -> None:
        """Hear of trouble before the next try, or of its end by None.

        Raises:
            Exception: The person does not want to wait; see `stop_error`.
        """
        if trouble is None:
            self._told = None
            self.say("the storage can be used again")
            return
        if self.stop_requested():
            raise self._stop_error(f"stopped by the user while waiting: {trouble}")
        if trouble != self._told:
            self._told = trouble
            self.say(f"{trouble}; waiting until that is over")
