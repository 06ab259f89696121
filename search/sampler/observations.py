"""Measurements of allocations, as the model takes them.

Notation: N observations, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from search.sampler.moves import Floats, Ints

LEVEL_VARIANCE = 4.0  # of a group's level, in units of the values' variance: nearly free


@dataclass(frozen=True)
class Observations:
    """What has been measured; lower values are better.

    Attributes:
        counts: [N, L] experts per layer.
        values: [N] finite objective values.
        variances: [N] known extra noise of each value, 0 for a full measurement.
        groups: [N] equal for trials with a common seed, whose values share a level; 0 is the group
            at whose level the model answers.
    """

    counts: Ints
    values: Floats
    variances: Floats
    groups: Ints

    @property
    def scale(self) -> float:
        """Standard deviation of the values, 1 where they are all alike."""
        deviation = float(self.values.std())
        alike = deviation <= 1e-12 * max(1.0, float(np.abs(self.values).max()))
        return 1.0 if alike else deviation

    @property
    def standard(self) -> Floats:
        """Values with mean 0 and standard deviation 1, [N]."""
        standard: Floats = (self.values - self.values.mean()) / self.scale
        return standard

    def levels(self) -> Floats:
        """Give the prior covariance [N, N] of the groups' levels, in units of squared scale."""
        same: Floats = LEVEL_VARIANCE * np.asarray(self.groups[:, None] == self.groups, dtype=float)
        return same

    def take(self, rows: Ints) -> Observations:
        """Select observations."""
        return Observations(
            self.counts[rows], self.values[rows], self.variances[rows], self.groups[rows]
        )

    def spread(self, limit: int) -> Observations:
        """Choose up to `limit` observations: the better half by value, the rest evenly."""
        order = np.argsort(self.values, kind="stable")
        if len(order) <= limit:
            return self
        rest = order[limit // 2 :]
        evenly = rest[np.linspace(0, len(rest) - 1, limit - limit // 2).astype(int)]
        return self.take(np.sort(np.concatenate([order[: limit // 2], evenly])))
