"""A search may stop early when nothing is left to gain, and only then."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import optuna
import pytest

from mola.allocation import ExpertBudget
from search.patience import LEAST, outlook
from search.sampler import BudgetSampler
from studies.encoding import distributions, from_params

BUDGET = ExpertBudget(8, 24, 1, 6)
WEIGHTS = np.linspace(0.0, 2.0, 8)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


def searched(trials: int, noise: float, direction: str = "minimize") -> optuna.Study:
    """A search of a landscape whose best allocation is at the end of the depth."""
    study = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=0), direction=direction)
    rng = np.random.default_rng(0)
    sign = 1.0 if direction == "maximize" else -1.0
    for _ in range(trials):
        trial = study.ask(dict(distributions(BUDGET)))
        experts = from_params(trial.params).experts
        value = float(WEIGHTS @ np.log1p(experts)) + noise * rng.normal()
        study.tell(trial, sign * value)
    return study


def test_nothing_is_said_before_the_model_has_seen_enough() -> None:
    assert outlook(searched(LEAST - 1, noise=0.1), BUDGET, 3) is None
    assert outlook(searched(LEAST, noise=0.1), BUDGET, 3) is not None


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_a_known_landscape_leaves_little_to_gain(direction: str) -> None:
    found = outlook(searched(40, noise=0.05, direction=direction), BUDGET, 3)
    assert found is not None
    assert found.settled
    assert 0 <= found.gain < 0.1  # of about 1.9 from the worst to the best
    assert 0.02 < found.resolution < 0.3  # 1.96 * 0.05 * sqrt(2 / 3) is 0.08


def test_more_fresh_seeds_resolve_more() -> None:
    study = searched(LEAST, noise=0.3)
    few, many = outlook(study, BUDGET, 1), outlook(study, BUDGET, 9)
    assert few is not None and many is not None
    assert few.gain == many.gain  # the same draws
    assert few.resolution == pytest.approx(3 * many.resolution)


def test_a_poor_choice_of_allocations_leaves_much_to_gain() -> None:
    study = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=0))
    worst = sorted(
        {BUDGET.uniform(np.random.default_rng(seed)) for seed in range(400)},
        key=lambda a: float(WEIGHTS @ np.log1p(a.experts)),
    )[:20]
    for allocation in worst:
        params = {f"experts_{i:02d}": n for i, n in enumerate(allocation.experts)}
        value = -float(WEIGHTS @ np.log1p(allocation.experts))
        study.add_trial(
            optuna.create_trial(
                params=params, distributions=dict(distributions(BUDGET)), value=value
            )
        )
    found = outlook(study, BUDGET, 3)
    assert found is not None
    assert not found.settled
    assert found.gain > 0.3
