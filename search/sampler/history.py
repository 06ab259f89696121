"""What a study's trials say about allocations: which are taken, which are on their way, and values.

Everything a sampler knows is read here, from the study alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import median

from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from mola.allocation import Allocation, ExpertBudget
from search.sampler.measure import Measured, counts_of, measure
from search.sampler.moves import Ints
from studies.encoding import distributions, from_params, param_names
from studies.once import OncePerTrial
from studies.records import LABEL_ATTR, REPLICATE

PROPOSAL_ATTR = "budget:allocation"  # system attribute: a proposal, before its parameters are set
_TIMED = 16  # latest full trials whose length is looked at


@dataclass(frozen=True)
class History:
    """A study's trials.

    Attributes:
        budget: what they are about.
        full: complete trials with finite values.
        cut: pruned trials.
        pending: allocations of running and waiting trials.
        taken: every allocation that was ever tried, failed ones included, or waits.
        failed: allocations that failed and never finished, [F, L].
        sign: -1 where higher is better.
    """

    budget: ExpertBudget
    full: tuple[tuple[FrozenTrial, Allocation], ...]
    cut: tuple[tuple[FrozenTrial, Allocation], ...]
    pending: tuple[Allocation, ...]
    taken: frozenset[Allocation]
    failed: Ints
    sign: float

    @property
    def seconds(self) -> float:
        """Median wall clock of the latest trials at full length; infinite without any."""
        durations = [trial.duration for trial, _ in self.full[-_TIMED:]]
        lengths = [duration.total_seconds() for duration in durations if duration is not None]
        return median(lengths) if lengths else math.inf

    @cached_property
    def measured(self) -> Measured:
        """What the finished trials measured; takes a while, and not each proposal needs it."""
        return measure(self.full, self.cut, self.budget, self.sign)


def all_trials(study: Study) -> list[FrozenTrial]:
    """Give the study's trials, those of a pruner's other brackets included, without copying."""
    return study._storage.get_all_trials(study._study_id, deepcopy=False)


def is_seen(trial: FrozenTrial) -> bool:
    """Whether proposals may depend on a trial; not on those that confirm what they find."""
    return trial.user_attrs.get(LABEL_ATTR) != REPLICATE


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
    """Sort a study's trials by what they say; values that are not finite say nothing.

    Args:
        trials: of one study.
        budget: trials outside it are left out.
        direction: of the study's only objective.
    """
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
    return History(
        budget=budget,
        full=tuple(full),
        cut=tuple(cut),
        pending=tuple(pending),
        taken=frozenset(taken),
        failed=counts_of(sorted(failed - {a for _, a in full + cut}), budget),
        sign=-1.0 if direction == StudyDirection.MAXIMIZE else 1.0,
    )
