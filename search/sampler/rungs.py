"""Extrapolate a trial from a rung to its end, by the trials that passed the same rung."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from optuna.trial import FrozenTrial

from search.sampler.moves import Floats


@dataclass(frozen=True)
class Passed:
    """Trials that passed a rung and ran to their end.

    Attributes:
        at_rung: Their values at the rung, [T].
        at_end: Their final values, [T].
    """

    at_rung: Floats
    at_end: Floats

    def extrapolate(self, value: float) -> tuple[float, float]:
        """Predict where a trial ends that has this value at the rung.

        The regression of ends on rungs is not biased by which trials were let pass the rung.

        Args:
            value: At the rung.

        Returns:
            The predicted final value, and the variance of that prediction.
        """
        line = self._line
        away = value - line.at_rung
        leverage = 1 / line.count + (away**2 / line.power if line.power > 0 else 0.0)
        return line.at_end + line.slope * away, line.variance * (1 + leverage)

    @cached_property
    def _line(self) -> _Line:
        centred = self.at_rung - self.at_rung.mean()
        power = float(centred @ centred)
        slope = float(centred @ self.at_end) / power if power > 0 else 0.0
        errors = self.at_end - self.at_end.mean() - slope * centred
        return _Line(
            count=len(self.at_rung),
            at_rung=float(self.at_rung.mean()),
            at_end=float(self.at_end.mean()),
            power=power,
            slope=slope,
            variance=float(errors @ errors) / (len(self.at_rung) - 2),
        )


@dataclass(frozen=True)
class _Line:
    """A straight line from values at a rung, around their mean, to values at the end."""

    count: int
    at_rung: float
    at_end: float
    power: float  # sum of the squared distances from the mean at the rung
    slope: float
    variance: float  # of what the line leaves unexplained


def passed_rung(complete: Iterable[FrozenTrial], step: int, fewest: int) -> Passed | None:
    """Collect the values of complete trials at a rung and at their end.

    Args:
        complete: Trials with a finite final value.
        step: Of the rung.
        fewest: So many trials, at least 3, are asked for.

    Returns:
        None with fewer trials that have a finite value there.
    """
    passed = [t for t in complete if math.isfinite(t.intermediate_values.get(step, math.nan))]
    if len(passed) < fewest:
        return None
    return Passed(
        at_rung=np.array([t.intermediate_values[step] for t in passed]),
        at_end=np.array([t.values[0] for t in passed]),
    )
