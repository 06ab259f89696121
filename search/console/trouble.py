"""Tell the person of trouble with the store, which is waited for, and let them end the wait."""

from __future__ import annotations

from collections.abc import Callable

import click

from search.driver import StopRequestedError


def _say(text: str) -> None:
    click.echo(text, err=True)


class StoreTrouble:
    """A listener of `PatientStorage`.

    Attributes:
        say: Shows a line.
        stop_requested: Whether the wait should end.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], None] = _say
        self.stop_requested: Callable[[], bool] = lambda: False
        self._told: str | None = None

    def __call__(self, trouble: str | None) -> None:
        """Hear of trouble before the next try, or of its end by None.

        Raises:
            StopRequestedError: The person does not want to wait.
        """
        if trouble is None:
            self._told = None
            self.say("the storage can be used again")
            return
        if self.stop_requested():
            raise StopRequestedError(f"stopped by the user while waiting: {trouble}")
        if trouble != self._told:
            self._told = trouble
            self.say(f"{trouble}; waiting until that is over")
