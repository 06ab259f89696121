"""Optuna's own contract tests for samplers, as far as they apply to a constrained integer space.

Inherited and run as they are: `test_sample_single_distribution` and the tests for samplers of a
single objective. The others suggest parameters of spaces of their own (floats, categories, integers
of a single parameter, ranges that change, conditions), which `BudgetSampler` refuses by design: a
layer drawn by itself, or any other parameter, would break the total, and test_search_sampler.py
tests the refusal. Where what they check has a meaning over a budget, it is checked here on the
budget's space under the same name; where it has none, the test is taken out:

- `test_float`, `test_categorical`, `test_sample_relative_categorical`,
  `test_sample_relative_mixed`: no such parameters;
- all of `MultiObjectiveSamplerTestCase`: several objectives are refused, as
  `SingleOnlySamplerTestCase` demands;
- `test_conditional_*`, `test_combination_of_different_distributions_objective`,
  `test_single_parameter_objective`, `test_dynamic_range_objective`: all layers are always there,
  with the budget's bounds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import optuna
import pytest
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    RelativeSamplerTestCase,
    SingleOnlySamplerTestCase,
)
from optuna.trial import TrialState

from mola.allocation import ExpertBudget
from search.sampler import BudgetSampler
from studies.encoding import distributions, from_params

BUDGET = ExpertBudget(6, 18, 1, 6)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


class _Contract:
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return lambda: BudgetSampler(BUDGET, seed=0)


def suggest(trial: optuna.Trial) -> float:
    for name, d in distributions(BUDGET).items():
        trial.suggest_int(name, d.low, d.high)
    assert from_params(trial.params) in BUDGET
    return float(trial.params["experts_00"])


class TestSingleOnly(_Contract, SingleOnlySamplerTestCase):
    pass


class TestBasic(_Contract, BasicSamplerTestCase):
    test_float = None
    test_categorical = None
    test_conditional_sample_independent = None
    test_conditional_parameter_objective = None
    test_combination_of_different_distributions_objective = None
    test_single_parameter_objective = None
    test_dynamic_range_objective = None

    def test_int(self, sampler: Callable[[], BaseSampler]) -> None:
        study = optuna.create_study(sampler=sampler())
        for _ in range(20):
            params = study.ask(dict(distributions(BUDGET))).params
            for name, d in distributions(BUDGET).items():
                assert d.low <= params[name] <= d.high
                assert type(params[name]) is int

    def test_nan_objective_value(self, sampler: Callable[[], BaseSampler]) -> None:
        study = optuna.create_study(sampler=sampler())
        for value in (5.0, 4.0, 3.0, 2.0, float("nan"), 1.0):
            study.optimize(lambda t, v=value: suggest(t) * 0 + v, n_trials=1)
            assert study.best_value == min(t.value for t in study.trials if t.value is not None)
        assert [t.state for t in study.trials].count(TrialState.FAIL) == 1

    def test_partial_fixed_sampling(self, sampler: Callable[[], BaseSampler]) -> None:
        """A wrapper takes layers out of the space, which is refused; a queue is the way."""
        study = optuna.create_study(sampler=sampler())
        study.optimize(suggest, n_trials=1)
        study.enqueue_trial({"experts_01": 4})
        study.optimize(suggest, n_trials=1)
        assert study.trials[-1].params["experts_01"] == 4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = optuna.samplers.PartialFixedSampler({"experts_01": 4}, study.sampler)
        with pytest.raises(ValueError, match="proposes all layers"):
            study.ask(dict(distributions(BUDGET)))


class TestRelative(_Contract, RelativeSamplerTestCase):
    test_sample_relative_categorical = None
    test_sample_relative_mixed = None

    def test_sample_relative_numerical(self, sampler: Callable[[], BaseSampler]) -> None:
        study = optuna.create_study(sampler=sampler())
        space = dict(distributions(BUDGET))
        study.tell(study.ask(space), 1.0)
        for _ in range(10):
            number = study._storage.create_new_trial(study._study_id)
            params = study.sampler.sample_relative(study, study._storage.get_trial(number), space)
            assert set(params) == set(space)
            assert all(type(n) is int for n in params.values())
            assert from_params(params) in BUDGET

    @pytest.mark.parametrize("n_jobs", [1, 2])
    def test_trial_relative_params(self, n_jobs: int, sampler: Callable[[], BaseSampler]) -> None:
        study = optuna.create_study(sampler=sampler())

        def objective(trial: optuna.Trial) -> float:
            assert trial._relative_params is None
            value = suggest(trial)
            assert trial._relative_params is not None
            return value

        study.optimize(objective, n_trials=10, n_jobs=n_jobs)
        assert len({from_params(t.params) for t in study.trials}) == 10
