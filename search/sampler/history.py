"""What a study's trials say about allocations: which are taken, which are on their way, and values.

Everything a sampler knows is read here, from the study alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median

import numpy as np
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from mola.allocation import Allocation, ExpertBudget
from search.sampler.moves import Floats, Ints
from search.sampler.observations import Observations
from search.sampler.rungs import Passed, passed_rung
from studies.encoding import distributions, from_params, param_names
from studies.once import OncePerTrial

PROPOSAL_ATTR = "budget:allocation"  # system attribute: a proposal, before its parameters are set
_MOST = 500  # observations that are all looked at
_BEST, _LATEST, _EVENLY = 200, 100, 100  # of more: so many; keeps time and memory flat
_TIMED = 16  # latest full trials whose length is looked at
_FEWEST_PAIRS = 3  # full trials with a rung, before a regression on that rung is trusted


@dataclass(frozen=True)
class History:
    """A study's trials.

    Attributes:
        observations: finished trials as measurements, lower is better.
        measured: the allocation of each observation.
        pending: allocations of running and waiting trials.
        taken: every allocation that was ever tried, failed ones included, or waits.
        failed: allocations that failed and never finished, [F, L].
        seconds: median wall clock of the latest trials at full length; infinite without any.
    """

    observations: Observations
    measured: tuple[Allocation, ...]
    pending: tuple[Allocation, ...]
    taken: frozenset[Allocation]
    failed: Ints
    seconds: float = math.inf


def all_trials(study: Study) -> list[FrozenTrial]:
    """Give the study's trials, those of a pruner's other brackets included, without copying."""
    return study._storage.get_all_trials(study._study_id, deepcopy=False)


def fixed_layers(trial: FrozenTrial, budget: ExpertBudget) -> dict[str, int]:
    """Give the parameters that an enqueued trial was given."""
    fixed: Mapping[str, int] = trial.system_attrs.get("fixed_params", {})
    return {name: fixed[name] for name in distributions(budget) if name in fixed}


def allocation_of(trial: FrozenTrial, budget: ExpertBudget) -> Allocation | None:
    """Find the allocation of a trial, None while it has none or if it is not in the budget."""
    params, names = trial.params, _names(budget.num_layers)
    if len(params) >= len(names) and all(map(params.__contains__, names)):
        allocation = Allocation([params[name] for name in names])
    elif PROPOSAL_ATTR in trial.system_attrs:
        allocation = Allocation.parse(trial.system_attrs[PROPOSAL_ATTR])
    else:
        known: dict[str, int] = {n: d.low for n, d in distributions(budget).items() if d.single()}
        known.update(fixed_layers(trial, budget))
        known.update({name: n for name, n in params.items() if name in names})
        if len(known) < len(names):
            return None
        allocation = from_params(known)
    return allocation if allocation in budget else None


@lru_cache(maxsize=4)
def _names(num_layers: int) -> list[str]:
    return param_names(num_layers)


@lru_cache(maxsize=4)
def _allocations(budget: ExpertBudget) -> OncePerTrial[Allocation | None]:
    """Give what finds the allocations of trials; it remembers those that it has found."""
    return OncePerTrial(lambda trial: allocation_of(trial, budget))


def all_in(taken: Collection[Allocation], budget: ExpertBudget) -> bool:
    """Say whether every allocation of a budget is among those taken."""
    size = budget.size()
    return len(taken) >= size and sum(allocation in budget for allocation in taken) >= size


def read_history(
    trials: Iterable[FrozenTrial], budget: ExpertBudget, direction: StudyDirection
) -> History:
    """Sort a study's trials into measurements, pending and taken allocations.

    A pruned trial counts as a measurement of what its last rung predicts, with the uncertainty of
    that prediction. Values that are not finite say nothing; extremely bad ones are cut and hold
    with as much doubt, so that a run that diverged does not drown the others.

    Args:
        trials: of one study.
        budget: trials outside it are left out.
        direction: of the study's only objective.
    """
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    full: list[tuple[FrozenTrial, Allocation]] = []
    cut: list[tuple[FrozenTrial, Allocation]] = []
    pending, taken, failed = [], set(), set()
    trials = list(trials)
    for trial, allocation in zip(trials, _allocations(budget)(trials), strict=True):
        if allocation is None:
            continue
        taken.add(allocation)
        if trial.state == TrialState.COMPLETE and math.isfinite(trial.values[0]):
            full.append((trial, allocation))
        elif trial.state == TrialState.PRUNED:
            cut.append((trial, allocation))
        elif not trial.state.is_finished():
            pending.append(allocation)
        else:
            failed.add(allocation)
    measured = [(t, a, sign * t.values[0], 0.0) for t, a in full]
    predict = _Predictor([t for t, _ in full], sign)
    for trial, allocation in cut:
        guess = predict(trial)
        if guess is not None:
            measured.append((trial, allocation, *guess))
    measured = _some(measured)
    values, doubt = _without_extremes(np.array([value for _, _, value, _ in measured]))
    return History(
        observations=Observations(
            counts=_counts([a for _, a, _, _ in measured], budget),
            values=values,
            variances=np.array([variance for *_, variance in measured]) + doubt,
            groups=_groups([t for t, *_ in measured]),
        ),
        measured=tuple(a for _, a, _, _ in measured),
        pending=tuple(pending),
        taken=frozenset(taken),
        failed=_counts(sorted(failed - {a for _, a in full + cut}), budget),
        seconds=_usual_seconds([t for t, _ in full[-_TIMED:]]),
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


def _usual_seconds(trials: Sequence[FrozenTrial]) -> float:
    lengths = [t.duration.total_seconds() for t in trials if t.duration is not None]
    return median(lengths) if lengths else math.inf


def _counts(allocations: Collection[Allocation], budget: ExpertBudget) -> Ints:
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
