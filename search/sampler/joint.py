"""The Optuna side of a sampler that proposes whole allocations of a budget."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mola.allocation import Allocation, ExpertBudget
from search.sampler.history import (
    PROPOSAL_ATTR,
    History,
    all_in,
    all_trials,
    fixed_layers,
    is_seen,
    read_history,
)
from studies.encoding import distributions, param_names, to_params

# Threads of one process propose one at a time: each must see what the others have proposed.
_PROPOSING = threading.Lock()


class BudgetExhausted(RuntimeError):  # noqa: N818 - an end, not an error
    """Every allocation of the budget has been tried or is on its way.

    Attributes:
        trial_number: the trial that asked; it has no allocation and should be told to have failed.
    """

    def __init__(self, budget: ExpertBudget, trial_number: int) -> None:
        size = budget.size()
        what = "the only allocation" if size == 1 else f"all {size} allocations"
        super().__init__(f"{what} of the budget have been tried or are running")
        self.trial_number = trial_number


class JointSampler(BaseSampler, abc.ABC):
    """Propose all layers' numbers of experts at once, always a free member of the budget.

    The state is the study: a sampler built anew over the same study goes on as before, and the same
    seed and history give the same proposal. No allocation is proposed that is finished, running,
    waiting or failed. Where an enqueued trial fixes some layers, the others are filled in.

    Args:
        budget: the allowed allocations.
        seed: of the random part of proposals; None draws one.
    """

    def __init__(self, budget: ExpertBudget, *, seed: int | None = None) -> None:
        self.budget = budget
        self._seed = _fresh_seed() if seed is None else seed

    @abc.abstractmethod
    def propose(
        self,
        study: Study,
        trial: FrozenTrial,
        history: History,
        among: ExpertBudget,
        rng: np.random.Generator,
    ) -> Allocation:
        """Choose a free allocation of `among`, which has at least one."""

    def reseed_rng(self) -> None:
        """Draw a new seed, as Optuna asks for in threads that share a sampler."""
        self._seed = _fresh_seed()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Give all layers' parameters, from the first trial on."""
        return dict(distributions(self.budget))

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """End the search of a budget without a choice, for which Optuna asks no sampler.

        Raises:
            BudgetExhausted: the only allocation was tried, and the trial is no enqueued replicate.
        """
        if self.budget.lows == self.budget.highs and not fixed_layers(trial, self.budget):
            others = [t for t in all_trials(study) if t.number != trial.number]
            if others:
                raise BudgetExhausted(self.budget, trial.number)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Propose an allocation.

        Raises:
            ValueError: the study has several objectives, the space is not the budget's, or layers
                that an enqueued trial fixes leave no way to reach the total.
            BudgetExhausted: no allocation is left.
        """
        self._raise_error_if_multi_objective(study)
        if search_space != self.infer_relative_search_space(study, trial):
            raise ValueError(
                f"{type(self).__name__} proposes all layers of {self.budget} at once, but the "
                "search space differs; fix a layer by equal lower and upper bounds of the budget"
            )
        with _PROPOSING:
            others = [t for t in all_trials(study) if t.number != trial.number and is_seen(t)]
            history = read_history(others, self.budget, study.direction)
            among = self._narrowed(trial)
            if all_in(history.taken, among):
                raise BudgetExhausted(among, trial.number)
            rng = np.random.default_rng([self._seed, trial.number])
            allocation = self.propose(study, trial, history, among, rng)
            assert allocation in among and allocation not in history.taken
            # Optuna writes the parameters one by one, later; other askers must know at once.
            study._storage.set_trial_system_attr(trial._trial_id, PROPOSAL_ATTR, str(allocation))
        return to_params(allocation)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Refuse: one layer drawn by itself would break the total.

        Raises:
            ValueError: always.
        """
        expected = distributions(self.budget).get(param_name)
        if expected is None:
            names = param_names(self.budget.num_layers)
            raise ValueError(
                f"{type(self).__name__} proposes the parameters {names[0]} to {names[-1]} alone, "
                f"not {param_name!r}"
            )
        raise ValueError(
            f"{param_name} cannot be drawn by itself without breaking the total of "
            f"{self.budget.total}; suggest it with {expected}, not {param_distribution}"
        )

    def after_trial(
        self,
        study: Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """End `study.optimize` once the whole budget has been tried."""
        if self.budget.size() > len(all_trials(study)):
            return
        if remaining(study, self.budget) == 0:
            with contextlib.suppress(RuntimeError):  # there is no loop to stop under ask and tell
                study.stop()

    def _narrowed(self, trial: FrozenTrial) -> ExpertBudget:
        """Give the part of the budget that agrees with the layers that an enqueued trial fixes."""
        fixed = fixed_layers(trial, self.budget)
        if not fixed:
            return self.budget
        names = param_names(self.budget.num_layers)
        lows = [fixed.get(name, low) for name, low in zip(names, self.budget.lows, strict=True)]
        highs = [fixed.get(name, most) for name, most in zip(names, self.budget.highs, strict=True)]
        return ExpertBudget(self.budget.num_layers, self.budget.total, lows, highs)


def remaining(study: Study, budget: ExpertBudget) -> int:
    """Count the allocations of the budget that no trial of the study has tried or will try."""
    history = read_history(all_trials(study), budget, study.direction)
    return budget.size() - len(history.taken)


def _fresh_seed() -> int:
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
