"""Decide when a trial has run for so long that its worker must be hanging."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_SECONDS = 600.0
TIMES_SLOWEST = 10
SILENT_SECONDS = 3600.0


@dataclass
class Deadline:
    """How long a trial may take.

    Attributes:
        fixed: Seconds, as the person has said; None learns from the trials that finished.
        slowest: Seconds of the slowest trial so far; 0 before there is one.
    """

    fixed: float | None = None
    slowest: float = 0.0

    def learn(self, seconds: float) -> None:
        """Take in how long a finished trial has trained and evaluated."""
        self.slowest = max(self.slowest, seconds)

    def overdue(self, running: float, silent: float) -> str | None:
        """Judge a trial.

        Args:
            running: Seconds since its start.
            silent: Seconds since anything was heard of it.

        Returns:
            Why it is given up; None as long as it is not.
        """
        if self.fixed is not None or self.slowest:
            limit = self.fixed or max(LEAST_SECONDS, TIMES_SLOWEST * self.slowest)
            if running > limit:
                return f"no result after {limit:.0f} s (--trial-timeout), its worker was ended"
        limit = max(SILENT_SECONDS, self.slowest)
        if self.fixed is None and silent > limit:
            return f"nothing heard of it for {limit:.0f} s (--trial-timeout), its worker was ended"
        return None
