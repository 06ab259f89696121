"""Turn finished trials into measurements: what was pruned is predicted, what diverged is cut."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from optuna.trial import FrozenTrial

from mola.allocation import Allocation, ExpertBudget
from search.sampler.moves import Floats, Ints
from search.sampler.observations import Observations
from search.sampler.rungs import Passed, passed_rung

_MOST = 500  # observations that are all looked at
_BEST, _LATEST, _EVENLY = 200, 100, 100  # of more: so many; keeps time and memory flat
_FEWEST_PAIRS = 3  # full trials with a rung, before a regression on that rung is trusted


@dataclass(frozen=True)
class Measured:
    """What trials measured.

    Attributes:
        allocations: of each observation.
        observations: lower is better.
    """

    allocations: tuple[Allocation, ...]
    observations: Observations


def measure(
    full: Sequence[tuple[FrozenTrial, Allocation]],
    cut: Sequence[tuple[FrozenTrial, Allocation]],
    budget: ExpertBudget,
    sign: float,
) -> Measured:
    """Take the results of trials, or the most telling ones of very many.

    A pruned trial counts as a measurement of what its last rung predicts, with the uncertainty of
    that prediction. Extremely bad values are cut and hold with as much doubt, so that a run that
    diverged does not drown the others.

    Args:
        full: complete trials with finite values.
        cut: pruned ones.
        budget: of the allocations.
        sign: -1 where higher is better.
    """
    measured = [(t, a, sign * t.values[0], 0.0) for t, a in full]
    predict = _Predictor([t for t, _ in full], sign)
    for trial, allocation in cut:
        guess = predict(trial)
        if guess is not None:
            measured.append((trial, allocation, *guess))
    measured = _some(measured)
    values, doubt = _without_extremes(np.array([value for _, _, value, _ in measured]))
    return Measured(
        allocations=tuple(a for _, a, _, _ in measured),
        observations=Observations(
            counts=counts_of([a for _, a, _, _ in measured], budget),
            values=values,
            variances=np.array([variance for *_, variance in measured]) + doubt,
            groups=_groups([t for t, *_ in measured]),
        ),
    )


class _Predictor:
    """Predicts final values of pruned trials, and their variances, from their last finite rungs.

    Args:
        full: Trials with a finite final value.
        sign: -1 where higher is better.
    """

    def __init__(self, full: Sequence[FrozenTrial], sign: float) -> None:
        self._full = full
        self._sign = sign
        self._by_step: dict[int, Passed | None] = {}

    def __call__(self, trial: FrozenTrial) -> tuple[float, float] | None:
        """Give a trial's final value and the variance of the prediction, None if unknown."""
        rungs = {s: v for s, v in trial.intermediate_values.items() if math.isfinite(v)}
        if not rungs:
            return None
        step = max(rungs)
        if step not in self._by_step:
            self._by_step[step] = passed_rung(self._full, step, _FEWEST_PAIRS)
        passed = self._by_step[step]
        if passed is None:
            return None
        mean, variance = passed.extrapolate(rungs[step])
        return self._sign * mean, variance


def _some(
    measured: list[tuple[FrozenTrial, Allocation, float, float]],
) -> list[tuple[FrozenTrial, Allocation, float, float]]:
    """Keep a part of a very long history, in the trials' order.

    The best tell where to go on, the latest what was just learnt, and the others, evenly over their
    values, how the landscape falls off; early contrasts are among them.
    """
    if len(measured) > _MOST:
        ranked = sorted(measured, key=lambda row: row[2])
        rest = sorted(ranked[_BEST:], key=lambda row: row[0].number)
        older = sorted(rest[:-_LATEST], key=lambda row: row[2])
        evenly = np.linspace(0, len(older) - 1, _EVENLY).astype(int)
        measured = [*ranked[:_BEST], *rest[-_LATEST:], *(older[i] for i in evenly)]
    return sorted(measured, key=lambda row: row[0].number)


def counts_of(allocations: Collection[Allocation], budget: ExpertBudget) -> Ints:
    """Write allocations as rows, [N, L]."""
    rows: Ints = np.array([a.experts for a in allocations], dtype=np.int64)
    return rows.reshape(-1, budget.num_layers)


def _without_extremes(values: Floats) -> tuple[Floats, Floats]:
    """Cut values that are worse than the worst tenth by far, or too large to be squared.

    Returns:
        The values, and their extra variances: what a cut value says is bad, no more.
    """
    if len(values) == 0:
        return values, values
    values = np.clip(values, -1e100, 1e100)
    best, poor = float(values.min()), float(np.quantile(values, 0.9))
    limit = best + 5 * (poor - best) if poor > best else float(values.max())
    return np.minimum(values, limit), np.where(values > limit, (limit - best) ** 2, 0.0)


def _groups(trials: Sequence[FrozenTrial]) -> Ints:
    """Number the trials' seeds, 0 for the commonest; trials without a seed are one group."""
    seeds = [str(trial.user_attrs.get("seed")) for trial in trials]
    numbers = {seed: i for i, (seed, _) in enumerate(Counter(seeds).most_common())}
    return np.array([numbers[seed] for seed in seeds], dtype=np.int64)
