"""What an expert is worth by depth, on a landscape whose answer is known."""

from __future__ import annotations

from itertools import islice

import numpy as np
import optuna
import pytest
from pretend_study import SPEC, empty_study, objective, run_one, searched_study

from mola.allocation import Allocation
from search.priors.named import named
from search.report.marginal import FEWEST, Worth, worth_by_layer

UNIFORM = named("5555", SPEC.budget)


@pytest.fixture(scope="module")
def study() -> optuna.Study:
    """Forty random allocations of the landscape."""
    made = empty_study()
    rng = np.random.default_rng(0)
    for allocation in dict.fromkeys(SPEC.budget.uniform(rng) for _ in range(40)):
        run_one(made, allocation)
    return made


@pytest.fixture(scope="module")
def worths(study: optuna.Study) -> list[Worth]:
    return worth_by_layer(study, SPEC.budget, UNIFORM, 0.01)


def true_change(layer: int) -> float:
    """Average over the donors, by the landscape itself."""
    changes = []
    for donor in range(6):
        if donor != layer:
            counts = list(UNIFORM.experts)
            counts[layer] += 1
            counts[donor] -= 1
            changes.append(objective(Allocation(counts), 0) - objective(UNIFORM, 0))
    return float(np.mean(changes))


def test_the_true_change_lies_in_the_interval(worths: list[Worth]) -> None:
    assert [w.layer for w in worths] == list(range(6))
    for worth in worths:
        assert worth.change is not None
        assert worth.low is not None
        assert worth.high is not None
        assert worth.low < worth.change < worth.high
        # The landscape's jitter of up to 0.006 is noise to the model.
        assert worth.low - 0.006 < true_change(worth.layer) < worth.high + 0.006


def test_a_clear_landscape_gives_narrow_intervals_and_clear_signs(worths: list[Worth]) -> None:
    first, last = worths[0], worths[-1]
    assert first.high is not None
    assert last.low is not None
    assert first.high < 0  # the first layer wants more
    assert last.low > 0  # the last one has too many


def test_layers_of_little_use_have_experts_to_spare(study: optuna.Study) -> None:
    spare = [w.spare for w in worth_by_layer(study, SPEC.budget, UNIFORM, 0.01)]
    assert spare[0] == 0
    assert spare[-1] == 2  # down to the fewest that are allowed
    assert all(0 <= s <= 2 for s in spare)


def test_less_is_spare_where_smaller_differences_can_be_told(study: optuna.Study) -> None:
    tight, wide = (
        [w.spare for w in worth_by_layer(study, SPEC.budget, UNIFORM, resolution)]
        for resolution in (0.0, 1.0)
    )
    assert tight[0] == 0  # whoever gets its experts gains less
    assert wide == [2] * 6
    assert all(a <= b for a, b in zip(tight, wide, strict=True))


def test_a_full_layer_gets_nothing_and_an_empty_one_gives_nothing(study: optuna.Study) -> None:
    full = Allocation([6, 6, 3, 1, 1, 1])
    worths = worth_by_layer(study, SPEC.budget, full, 1.0)
    assert [w.change is None for w in worths] == [True, True, False, False, False, False]
    assert [w.spare for w in worths][3:] == [0, 0, 0]


def test_too_few_trials_say_nothing() -> None:
    few = empty_study()
    for allocation in islice(SPEC.budget.neighbours(UNIFORM), FEWEST - 1):
        run_one(few, allocation)
    assert worth_by_layer(few, SPEC.budget, UNIFORM, 0.01) == []


def test_seeds_that_differ_do_not_count_as_differences_of_allocations() -> None:
    study = searched_study(confirm_seeds=3)
    for worth in worth_by_layer(study, SPEC.budget, UNIFORM, 0.01):
        assert worth.change is not None
        assert abs(worth.change - true_change(worth.layer)) < 0.05  # a seed moves all by 0.05
