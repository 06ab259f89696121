"""Say when further trials can no longer gain what the confirmation could tell from nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import optuna

from mola.allocation import ExpertBudget
from search.sampler.features import FeatureMap
from search.sampler.history import all_trials, read_history
from search.sampler.moves import best_additive
from search.sampler.surrogate import fit

LEAST = 16  # measured allocations before the model is believed
_DRAWS = 64  # of the posterior
_NORMAL_95 = 1.96


@dataclass(frozen=True)
class Outlook:
    """What a search may still gain; both in the objective's unit.

    Attributes:
        gain: Expected gain of the best allocation over the best measured one, if it were found for
            sure: more than any number of further trials can be expected to bring.
        resolution: Half width of the interval of a paired difference on the fresh seeds.
    """

    gain: float
    resolution: float

    @property
    def settled(self) -> bool:
        """Whether no gain is left that the confirmation could tell from nothing."""
        return self.gain < self.resolution


def outlook(study: optuna.Study, budget: ExpertBudget, fresh_seeds: int) -> Outlook | None:
    """Estimate what further trials could gain.

    Draws of the model's posterior are landscapes that agree with the trials so far. Each has its
    own best allocation, exactly known for the layers' own shares; the mean of what these would gain
    over the best measured allocation is the expected gain of a perfect search.

    Args:
        study: The study, whose state alone decides.
        budget: The allowed allocations.
        fresh_seeds: Number of seeds of the confirmation, at least 1.

    Returns:
        None with fewer than LEAST measured allocations.
    """
    history = read_history(all_trials(study), budget, study.direction)
    if len(set(history.measured.allocations)) < LEAST:
        return None
    model = fit(FeatureMap(budget), history.measured.observations)
    first = model.features.first
    counts = history.measured.observations.counts
    best = counts[model.mean(counts).argmin()]  # [L]
    tables = model.samples(_DRAWS, np.random.default_rng(0))  # [S, L, V]
    optima = best_additive(tables, budget, first)  # [S, L]
    draws, layers = np.arange(_DRAWS)[:, None], np.arange(budget.num_layers)
    gains = tables[:, layers, best - first] - tables[draws, layers, optima - first]
    noise = model.scale * math.sqrt(model.noise)
    return Outlook(
        gain=float(gains.sum(axis=1).mean()),
        resolution=_NORMAL_95 * noise * math.sqrt(2 / fresh_seeds),
    )
