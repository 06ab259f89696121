"""A stock sampler's proposals are projected, and it hears of all that Optuna tells a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mola.allocation import ExpertBudget
from search.sampler.cma import CmaEsSampler
from search.sampler.projected import ProjectedSampler
from studies.encoding import distributions, from_params

BUDGET = ExpertBudget(5, 15, [1, 1, 3, 1, 1], [6, 6, 3, 6, 6])
SPACE: dict[str, BaseDistribution] = {**distributions(BUDGET)}


class Stock(BaseSampler):
    """Proposes what it is told to, and notes what it hears."""

    def __init__(self, *wanted: dict[str, Any]) -> None:
        self.wanted = list(wanted)
        self.heard: list[str] = []

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        raise AssertionError("the space is the budget's")

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        self.heard.append(f"sample {' '.join(search_space)}")
        return self.wanted.pop(0)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        raise AssertionError("no layer is drawn by itself")

    def reseed_rng(self) -> None:
        self.heard.append("reseed")

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self.heard.append(f"before {trial.number}")

    def after_trial(
        self,
        study: Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        self.heard.append(f"after {trial.number} {state.name} {values}")


def wanted(*counts: int) -> dict[str, int]:
    """Counts of all layers but the third, which has no choice."""
    names = [name for name, range_ in SPACE.items() if not range_.single()]
    return dict(zip(names, counts, strict=True))


def test_what_the_stock_sampler_wants_is_projected_onto_the_budget() -> None:
    sampler = ProjectedSampler(Stock(wanted(6, 6, 2, 2), wanted(6, 1, 1, 4)), BUDGET, seed=0)
    study = optuna.create_study(sampler=sampler)
    assert from_params(study.ask(SPACE).params) == BUDGET.project([6, 6, 3, 2, 2])
    assert from_params(study.ask(SPACE).params).experts == (6, 1, 3, 1, 4)


def test_a_taken_projection_and_no_proposal_at_all_give_another_member() -> None:
    same = wanted(6, 1, 1, 4)
    study = optuna.create_study(sampler=ProjectedSampler(Stock(same, same, {}), BUDGET, seed=0))
    asked = [from_params(study.ask(SPACE).params) for _ in range(3)]
    assert len(set(asked)) == 3
    assert all(allocation in BUDGET for allocation in asked)
    moved = sum(abs(a - b) for a, b in zip(asked[0].experts, asked[1].experts, strict=True))
    assert moved == 2  # a neighbour


def test_the_stock_sampler_hears_of_all_trials_and_of_new_seeds() -> None:
    stock = Stock(wanted(6, 1, 1, 4))
    sampler = ProjectedSampler(stock, BUDGET, seed=3)
    study = optuna.create_study(sampler=sampler)
    study.tell(study.ask(SPACE), 0.5)
    sampler.reseed_rng()
    assert stock.heard == [
        "before 0",
        "sample experts_00 experts_01 experts_03 experts_04",
        "after 0 COMPLETE [0.5]",
        "reseed",
    ]
    assert sampler._seed != 3


def test_a_state_of_cma_es_that_is_none_is_refused_at_the_start() -> None:
    study = optuna.create_study()
    trial = study.ask()
    study._storage.set_trial_system_attr(trial._trial_id, "cma:optimizer:0", "80049500")
    with pytest.raises(ValueError, match="cma"):
        ProjectedSampler(CmaEsSampler(seed=0), BUDGET, seed=0).check(study)
