"""Stop trials that fall behind others of the same seed."""

from __future__ import annotations

import math
from statistics import median

import optuna
from optuna.trial import FrozenTrial, TrialState

from search.sampler.rungs import Passed, passed_rung
from studies.records import SEED_ATTR
from studies.stats import t_quantile

PRUNERS = ("learnt", "median", "none")
_STARTUP = 8  # trials that are let run to their end


class LearntPruner(optuna.pruners.BasePruner):
    """Prune a trial whose rung says that it ends in the worse half.

    What a rung says is learnt from the trials that passed it: a regression of their ends on their
    values there. Where the rung does not tell how a trial ends, nothing is pruned.

    Args:
        startup: nothing is pruned before so many other trials passed the rung, at least 3.
    """

    def __init__(self, startup: int = _STARTUP) -> None:
        self.startup = startup

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Judge a trial by the last value that it reported."""
        step = trial.last_step
        if step is None:
            return False
        complete = [t for t in _of_same_seed(study, trial) if t.state == TrialState.COMPLETE]
        passed = passed_rung(complete, step, self.startup)
        return passed is not None and ends_behind(trial.intermediate_values[step], passed)


class PairedMedianPruner(optuna.pruners.BasePruner):
    """Prune a trial that is worse at a rung than the median of the trials of its seed there.

    Optuna's own median pruner would compare with replicates on other seeds, whose objectives lie
    further apart than those of good and bad allocations. Pruned trials count in the median, which
    therefore does not creep upwards as the survivors get better.

    Args:
        startup: nothing is pruned before so many other trials reached the rung.
    """

    def __init__(self, startup: int = _STARTUP) -> None:
        self.startup = startup

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Judge a trial by the last value that it reported."""
        step = trial.last_step
        if step is None:
            return False
        others = [
            other.intermediate_values[step]
            for other in _of_same_seed(study, trial)
            if step in other.intermediate_values
        ]
        if len(others) < self.startup:
            return False
        return trial.intermediate_values[step] > median(others)


def ends_behind(value: float, passed: Passed, confidence: float = 0.9) -> bool:
    """Say whether a trial is sure to end in the worse half, by its value at a rung.

    Args:
        value: At the rung; lower is better.
        passed: The trials that passed it, at least 3.
        confidence: Wanted probability that the end is worse than the median of theirs.
    """
    mean, variance = passed.extrapolate(value)
    better_half = float(median(passed.at_end))
    lucky = mean - t_quantile(confidence, len(passed.at_end) - 2) * math.sqrt(variance)
    return bool(value > median(passed.at_rung) and lucky > better_half)


def make_pruner(name: str) -> optuna.pruners.BasePruner:
    """Make the pruner of a name in PRUNERS.

    Raises:
        ValueError: the name is unknown.
    """
    if name == "learnt":
        return LearntPruner()
    if name == "median":
        return PairedMedianPruner()
    if name == "none":
        return optuna.pruners.NopPruner()
    raise ValueError(f"unknown pruner {name!r}; expected one of {', '.join(PRUNERS)}")


def _of_same_seed(study: optuna.Study, trial: FrozenTrial) -> list[FrozenTrial]:
    """Give the study's complete and pruned trials with the trial's seed."""
    seed = trial.user_attrs.get(SEED_ATTR)
    ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    return [other for other in ended if other.user_attrs.get(SEED_ATTR) == seed]
