"""Stop trials that fall behind others of the same seed."""

from __future__ import annotations

from statistics import median

import optuna
from optuna.trial import FrozenTrial, TrialState

from studies.records import SEED_ATTR

PRUNERS = ("median", "none")


class PairedMedianPruner(optuna.pruners.BasePruner):
    """Prune a trial that is worse at a rung than the median of the trials of its seed there.

    Optuna's own median pruner would compare with replicates on other seeds, whose objectives lie
    further apart than those of good and bad allocations. Pruned trials count in the median, which
    therefore does not creep upwards as the survivors get better.

    Args:
        startup: nothing is pruned before so many other trials reached the rung.
    """

    def __init__(self, startup: int = 8) -> None:
        self.startup = startup

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Judge a trial by the last value that it reported."""
        step = trial.last_step
        if step is None:
            return False
        others = [
            other.intermediate_values[step]
            for other in study.get_trials(
                deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)
            )
            if step in other.intermediate_values
            and other.user_attrs.get(SEED_ATTR) == trial.user_attrs.get(SEED_ATTR)
        ]
        if len(others) < self.startup:
            return False
        return trial.intermediate_values[step] > median(others)


def make_pruner(name: str) -> optuna.pruners.BasePruner:
    """Make the pruner of a name in PRUNERS.

    Raises:
        ValueError: the name is unknown.
    """
    if name == "median":
        return PairedMedianPruner()
    if name == "none":
        return optuna.pruners.NopPruner()
    raise ValueError(f"unknown pruner {name!r}; expected one of {', '.join(PRUNERS)}")
