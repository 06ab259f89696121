"""What finished trials measure: all of a short history, the telling part of a long one."""

from __future__ import annotations

import math

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from mola.allocation import Allocation, ExpertBudget
from search.sampler.measure import Measured, measure
from studies.encoding import distributions, to_params

BUDGET = ExpertBudget(6, 30, 1, 10)
NUMBERS = {BUDGET.member(number): number for number in range(600)}
RUNG = 5

Pairs = list[tuple[FrozenTrial, Allocation]]


def trial(
    number: int, value: float, rung: float | None = None, *, pruned: bool = False, seed: int = 0
) -> tuple[FrozenTrial, Allocation]:
    allocation = BUDGET.member(number)
    made = optuna.create_trial(
        state=TrialState.PRUNED if pruned else TrialState.COMPLETE,
        value=value,
        params=to_params(allocation),
        distributions=dict(distributions(BUDGET)),
        user_attrs={"seed": seed},
        intermediate_values={} if rung is None else {RUNG: rung},
    )
    made.number = number
    return made, allocation


def numbers(measured: Measured) -> list[int]:
    return [NUMBERS[allocation] for allocation in measured.allocations]


def test_a_history_of_five_hundred_is_looked_at_whole() -> None:
    values = np.random.default_rng(0).normal(size=500)
    full = [trial(i, v) for i, v in enumerate(values)]
    measured = measure(full, [], BUDGET, 1.0)
    assert numbers(measured) == list(range(500))
    assert measured.observations.values.tolist() == values.tolist()
    assert measured.observations.counts.tolist() == [list(a.experts) for _, a in full]


def test_of_a_longer_one_the_best_the_latest_and_some_of_all_others_are() -> None:
    values = np.random.default_rng(0).permutation(600).astype(float)
    measured = measure([trial(i, v) for i, v in enumerate(values)], [], BUDGET, 1.0)
    kept = numbers(measured)
    assert kept == sorted(set(kept))
    assert len(kept) == 400
    best = set(np.argsort(values)[:200].tolist())
    latest = [i for i in range(600) if i not in best][-100:]
    assert best | set(latest) <= set(kept)
    others = sorted(values[i] for i in kept if i not in best and i not in latest)
    older = sorted(values[i] for i in range(600) if i not in best and i not in latest)
    assert (others[0], others[-1]) == (older[0], older[-1])
    steps = np.diff([older.index(value) for value in others])
    assert steps.min() >= math.floor(299 / 99)
    assert steps.max() <= math.ceil(299 / 99)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_pruned_trial_counts_as_what_its_rung_foretells(sign: float) -> None:
    rungs = [1.0, 2.0, 3.0, 4.0, 6.0]
    full = [trial(i, sign * (10 + 2 * r), sign * r) for i, r in enumerate(rungs)]
    cut = [trial(9, sign * 7.0, sign * 7.0, pruned=True)]
    seen = measure(full, cut, BUDGET, sign).observations
    assert seen.values == pytest.approx([12, 14, 16, 18, 22, 24])
    assert seen.variances == pytest.approx([0.0] * 6, abs=1e-9)


def test_a_rung_that_few_passed_foretells_nothing() -> None:
    full = [trial(0, 1.0, 1.0), trial(1, 2.0, 2.0), trial(2, 3.0)]
    cut = [trial(3, 3.0, 3.0, pruned=True), trial(4, 3.0, pruned=True)]
    assert numbers(measure(full, cut, BUDGET, 1.0)) == [0, 1, 2]
    assert numbers(measure([*full, trial(5, 3.0, 3.0)], cut, BUDGET, 1.0)) == [0, 1, 2, 3, 5]


def test_a_value_far_beyond_the_others_is_cut_and_doubted() -> None:
    full = [trial(i, float(i)) for i in range(11)] + [trial(11, 1e300), trial(12, -math.pi)]
    seen = measure(full, [], BUDGET, 1.0).observations
    poor = float(np.quantile([*range(11), 1e100, -math.pi], 0.9))
    limit = -math.pi + 5 * (poor + math.pi)
    assert seen.values[:11].tolist() == list(range(11))
    assert seen.values[11] == pytest.approx(limit)
    assert seen.variances[11] == pytest.approx((limit + math.pi) ** 2)
    assert np.delete(seen.variances, 11).tolist() == [0.0] * 12


def test_where_all_but_one_are_alike_that_one_sets_the_limit() -> None:
    seen = measure([trial(i, 1.0) for i in range(20)] + [trial(20, 5.0)], [], BUDGET, 1.0)
    assert seen.observations.values.tolist() == [1.0] * 20 + [5.0]
    assert not seen.observations.variances.any()


def test_the_commonest_seed_is_group_0() -> None:
    full = [trial(i, 1.0, seed=seed) for i, seed in enumerate((4, 7, 7, 4, 7))]
    assert measure(full, [], BUDGET, 1.0).observations.groups.tolist() == [1, 0, 0, 1, 0]


def test_nothing_finished_is_nothing_measured() -> None:
    seen = measure([], [], BUDGET, 1.0)
    assert seen.allocations == ()
    assert seen.observations.counts.shape == (0, BUDGET.num_layers)
