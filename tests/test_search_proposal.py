"""What is tried next: attempts at what promises most, contrasts that tell most."""

from __future__ import annotations

import numpy as np
import pytest

from mola.allocation import Allocation, ExpertBudget
from search.sampler.features import FeatureMap
from search.sampler.moves import Space, best_additive
from search.sampler.observations import Observations
from search.sampler.proposal import (
    _opening,
    _walsh,
    attempts,
    best_of,
    contrasts,
    is_attempt,
    propose,
)
from search.sampler.surrogate import Posterior, fit

BUDGET = ExpertBudget(8, 32, 1, 8)
WEIGHTS = np.linspace(2, 0.2, 8)  # lower layers want experts


def measured(count: int, budget: ExpertBudget = BUDGET) -> Observations:
    rng = np.random.default_rng(0)
    counts = np.array([budget.uniform(rng).experts for _ in range(count)])
    values = -np.log1p(counts) @ WEIGHTS + 0.05 * rng.normal(size=count)
    return Observations(counts, values, np.zeros(count), np.zeros(count, dtype=int))


@pytest.fixture(scope="module")
def model() -> Posterior:
    return fit(FeatureMap(BUDGET), measured(24))


@pytest.mark.parametrize("layers", [2, 3, 8, 12, 32, 33])
def test_contrasts_are_balanced_go_from_slow_to_fast_and_separate_the_layers(layers: int) -> None:
    signs = _walsh(layers)
    size = 1 << (layers - 1).bit_length()
    assert signs.shape == (size - 1, layers)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    changes = (np.diff(signs, axis=1) != 0).sum(axis=1)
    assert (np.diff(changes) >= 0).all()
    if layers == size:
        assert not signs.sum(axis=1).any()
        assert (signs @ signs.T == layers * np.eye(size - 1)).all()


def test_a_search_opens_with_uniform_and_halves_of_the_depth_at_both_bounds() -> None:
    opening = _opening(Space(BUDGET, ()))
    assert opening[0].tolist() == [4] * 8
    assert all(Allocation(row.tolist()) in BUDGET for row in opening)
    lower, upper = opening[1, :4], opening[1, 4:]
    assert {lower.sum(), upper.sum()} == {28, 4}
    ends = opening[1:5, [0, -1]]
    assert {tuple(row) for row in ends.tolist()} == {(7, 1), (7, 7), (1, 7), (1, 1)}


def test_attempts_are_rare_until_each_layer_has_had_two_trials() -> None:
    first = [taken for taken in range(16) if is_attempt(taken, 8)]
    assert first == [5, 11]
    later = [taken for taken in range(16, 24) if is_attempt(taken, 8)]
    assert later == [17, 19, 21, 23]


def test_attempts_go_where_the_model_promises_most(model: Posterior) -> None:
    space, rng = Space(BUDGET, ()), np.random.default_rng(0)
    best = best_of(space, model, rng)
    ranked = attempts(space, model, measured(24), best, rng)
    mean, deviation = model.mean_and_deviation(ranked)
    promise = mean - 0.3 * deviation
    assert (np.diff(promise) >= -1e-9).all()
    assert best.tolist() in ranked.tolist()
    near = np.abs(ranked[:, None] - best).sum(axis=2).min(axis=1)
    assert (near <= 2).sum() >= len(ranked) / 2  # the surroundings of the best
    assert (-np.log1p(ranked[0]) @ WEIGHTS) < measured(24).values.min() + 0.2


def test_contrasts_that_tell_most_come_first(model: Posterior) -> None:
    space, rng = Space(BUDGET, ()), np.random.default_rng(0)
    best = best_of(space, model, rng)
    ranked = contrasts(space, model, best, rng)
    optima = best_additive(model.samples(256, np.random.default_rng(9)), BUDGET, 1)
    gains = model.gain(ranked, best, optima)
    tenth = len(ranked) // 10
    assert gains[:tenth].mean() > 2 * gains[-tenth:].mean()
    assert np.corrcoef(gains, -np.arange(len(gains)))[0, 1] > 0.8
    assert len({tuple(row) for row in ranked.tolist()}) == len(ranked)
    assert all(Allocation(row) in BUDGET for row in ranked.tolist())


def test_contrasts_are_bold_and_less_so_both_ways_around_the_best(model: Posterior) -> None:
    space, rng = Space(BUDGET, ()), np.random.default_rng(0)
    best = best_of(space, model, rng)
    moved = np.log1p(contrasts(space, model, best, rng)) - np.log1p(best)
    size = np.abs(moved).mean(axis=1)
    assert size.min() < 0.35
    assert size.max() > 0.8
    halves = moved[:, :4].mean(axis=1) - moved[:, 4:].mean(axis=1)
    assert halves.min() < -0.3 and halves.max() > 0.1


def test_without_a_model_the_opening_is_followed_in_turn() -> None:
    few, features = measured(2), FeatureMap(BUDGET)
    taken: list[Allocation] = []
    rng = np.random.default_rng(0)
    for _ in range(4):
        taken.append(propose(BUDGET, features, few, (), taken, rng))
    assert [list(a.experts) for a in taken] == _opening(Space(BUDGET, ()))[:4].tolist()
