"""Say what an expert is worth at each depth, as the sampler's model of the objective sees it.

Notation: L layers, M allocations; counts are [M, L] integers. The total is fixed, so an expert has
no worth by itself: what can be known is the change when one moves from a layer to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import optuna

from mola.allocation import Allocation, ExpertBudget
from search.sampler.features import FeatureMap
from search.sampler.history import History, read_history
from search.sampler.moves import Floats, Ints
from search.sampler.surrogate import fit

FEWEST = 6  # finished trials below which the model says nothing worth a figure
_NORMAL = 1.96  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True)
class Worth:
    """One more expert in a layer, taken from the average other layer.

    Attributes:
        layer: The layer that gets it.
        experts: What it has in the allocation that the moves start from.
        change: Expected change of the objective in its unit; negative is better. None: full.
        low: Lower end of the change's 95 % interval; None likewise.
        high: Upper end; None likewise.
        spare: Experts that it could give to others with an increase of the objective that is, with
            97.5 % probability, below the resolution of the search.
    """

    layer: int
    experts: int
    change: float | None
    low: float | None
    high: float | None
    spare: int


def worth_by_layer(
    study: optuna.Study, budget: ExpertBudget, base: Allocation, resolution: float
) -> list[Worth]:
    """Ask the sampler's model about moves of one expert around an allocation.

    Args:
        study: With its trials.
        budget: What is searched.
        base: Where the moves start, a member of the budget.
        resolution: Smallest difference of the objective that the search can tell, in its unit.

    Returns:
        One per layer; empty where too few trials have finished.
    """
    trials = study.get_trials(deepcopy=False)
    history = read_history(trials, budget, study.direction)
    if len(history.measured.allocations) < FEWEST:
        return []
    model = _Differences(history, budget, base)
    changes = [_one_more(model, budget, layer) for layer in range(budget.num_layers)]
    order = sorted(range(budget.num_layers), key=lambda layer: changes[layer][:1] or (np.inf,))
    worths = []
    for layer, known in enumerate(changes):
        change, low, high = known or (None, None, None)
        spare = _spare(model, budget, layer, order, resolution)
        worths.append(Worth(layer, base.experts[layer], change, low, high, spare))
    return worths


class _Differences:
    """The model's view of f(x) - f(base), with a deviation that knows how the two go together."""

    def __init__(self, history: History, budget: ExpertBudget, base: Allocation) -> None:
        self.base: Ints = np.array(base.experts, dtype=np.int64)
        features = FeatureMap(budget)
        self._model = fit(features, history.measured.observations)
        # A pending trial at the base narrows the deviation elsewhere by as much as both have in
        # common: V(x | base) = V(x) - C(x, base)^2 / (V(base) + noise), and at the base itself
        # V(base | base) = V(base) noise / (V(base) + noise), which gives the noise.
        self._narrowed = fit(features, history.measured.observations, self.base[None])
        mean, deviation = self._model.mean_and_deviation(self.base[None])
        _, narrow = self._narrowed.mean_and_deviation(self.base[None])
        self._mean, self._variance = float(mean[0]), float(deviation[0]) ** 2
        fall = self._variance - float(narrow[0]) ** 2
        self._noisy = self._variance**2 / fall if fall > 0 else np.inf

    def __call__(self, counts: Ints) -> tuple[Floats, Floats]:
        """Give mean and standard deviation [M] of the differences at counts [M, L]."""
        mean, deviation = self._model.mean_and_deviation(counts)
        _, narrow = self._narrowed.mean_and_deviation(counts)
        common = np.sqrt(np.maximum(deviation**2 - narrow**2, 0.0) * self._noisy)
        variance = deviation**2 + self._variance - 2 * common
        return mean - self._mean, np.sqrt(np.maximum(variance, 0.0))


def _one_more(
    model: _Differences, budget: ExpertBudget, layer: int
) -> tuple[float, float, float] | tuple[()]:
    """Give change, low and high of one more expert from the average layer that has one to give.

    Empty where the layer is full or no other can give.

    The mean of several differences deviates by at most the mean of their deviations, which is what
    the interval takes, so that it is wide rather than narrow.
    """
    if model.base[layer] >= budget.highs[layer]:
        return ()
    donors = [j for j in _others(budget, layer) if model.base[j] > budget.lows[j]]
    if not donors:
        return ()
    counts = np.repeat(model.base[None], len(donors), axis=0)
    counts[:, layer] += 1
    counts[np.arange(len(donors)), donors] -= 1
    mean, deviation = model(counts)
    change, half = float(mean.mean()), _NORMAL * float(deviation.mean())
    return change, change - half, change + half


def _spare(
    model: _Differences, budget: ExpertBudget, layer: int, order: Sequence[int], resolution: float
) -> int:
    """Count the experts that a layer could give away, one each to those that gain the most."""
    room = [j for j in order if j != layer and model.base[j] < budget.highs[j]]
    most = min(int(model.base[layer]) - budget.lows[layer], len(room))
    if most == 0:
        return 0
    counts = np.repeat(model.base[None], most, axis=0)
    for given in range(most):
        counts[given, layer] -= given + 1
        counts[given, room[: given + 1]] += 1
    mean, deviation = model(counts)
    too_much = mean + _NORMAL * deviation >= resolution
    return int(np.argmax(too_much)) if bool(too_much.any()) else most


def _others(budget: ExpertBudget, layer: int) -> list[int]:
    return [j for j in range(budget.num_layers) if j != layer]
