"""Stock Optuna samplers, made to keep the budget by projection; the peers of BudgetSampler."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mola.allocation import Allocation, ExpertBudget
from search.sampler.cma import CmaEsSampler
from search.sampler.history import History, is_seen
from search.sampler.joint import JointSampler
from search.sampler.moves import Space
from studies.encoding import distributions


class UniformSampler(JointSampler):
    """Draw allocations from the budget, each with exactly the same probability."""

    def propose(
        self,
        study: Study,
        trial: FrozenTrial,
        history: History,
        among: ExpertBudget,
        rng: np.random.Generator,
    ) -> Allocation:
        """Draw a free allocation."""
        return _free(among.uniform(rng), history, among, rng)


class ProjectedSampler(JointSampler):
    """Project another sampler's joint proposal onto the budget.

    A projection that is taken is replaced by a free neighbour. Until the other sampler proposes
    anything, allocations are drawn uniformly.

    Args:
        base: proposes integers per layer, without knowing of the total. Its own random state makes
            proposals depend on more than seed and history.
        budget: the allowed allocations.
        seed: of the uniform draws.
    """

    def __init__(self, base: BaseSampler, budget: ExpertBudget, *, seed: int | None = None) -> None:
        super().__init__(budget, seed=seed)
        self._base = base

    def propose(
        self,
        study: Study,
        trial: FrozenTrial,
        history: History,
        among: ExpertBudget,
        rng: np.random.Generator,
    ) -> Allocation:
        """Project the base sampler's proposal."""
        space: dict[str, BaseDistribution] = {
            name: d for name, d in distributions(self.budget).items() if not d.single()
        }
        wanted = self._base.sample_relative(_Seen.of(study), trial, space)
        if not wanted:
            return _free(among.uniform(rng), history, among, rng)
        weights = [
            wanted.get(name, low)
            for name, low in zip(distributions(self.budget), self.budget.lows, strict=True)
        ]
        return _free(among.project(weights), history, among, rng)

    def check(self, study: Study) -> None:
        """Refuse a study that holds what the base sampler cannot go on with.

        Raises:
            ValueError: what its state in the study is.
        """
        if isinstance(self._base, CmaEsSampler):
            self._base.check(study)

    def reseed_rng(self) -> None:
        """Reseed both samplers."""
        super().reseed_rng()
        self._base.reseed_rng()

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Pass on to the base sampler, unless the search is at its end."""
        super().before_trial(study, trial)
        self._base.before_trial(study, trial)

    def after_trial(
        self,
        study: Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Pass on to the base sampler, and end an exhausted search."""
        self._base.after_trial(study, trial, state, values)
        super().after_trial(study, trial, state, values)


class _Seen(Study):
    """A study without the trials that proposals may not depend on.

    Other samplers know nothing of seeds, and would take what differs between them for the
    allocations' doing.
    """

    @classmethod
    def of(cls, study: Study) -> _Seen:
        """Make it of a study, which it shares the storage with."""
        seen = cls.__new__(cls)
        seen.__setstate__(study.__getstate__())
        return seen

    def _get_trials(
        self,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
        use_cache: bool = False,
    ) -> list[FrozenTrial]:
        return [t for t in super()._get_trials(deepcopy, states, use_cache) if is_seen(t)]


def _free(
    allocation: Allocation, history: History, among: ExpertBudget, rng: np.random.Generator
) -> Allocation:
    return Space(among, history.taken).first_free(np.array([allocation.experts]), rng)
