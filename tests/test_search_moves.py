"""Moves, rounding and exact additive minima over small budgets, against enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mola.allocation import Allocation, ExpertBudget
from search.sampler.moves import Space, best_additive

BUDGETS = [
    ExpertBudget(4, 10, 1, 5),
    ExpertBudget(5, 9, 0, 3),
    ExpertBudget(4, 9, [0, 2, 1, 3], [4, 2, 5, 6]),
    ExpertBudget(3, 6, 2, 2),
    ExpertBudget(1, 4, 0, 7),
]


def members(budget: ExpertBudget) -> list[tuple[int, ...]]:
    return [budget.member(rank).experts for rank in range(budget.size())]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("seed", range(5))
def test_best_additive_is_the_minimum(budget: ExpertBudget, seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = min(budget.lows)
    tables = rng.normal(size=(budget.num_layers, max(budget.highs) - first + 1))

    def value(experts: tuple[int, ...]) -> float:
        return float(sum(tables[layer, n - first] for layer, n in enumerate(experts)))

    found = tuple(best_additive(tables, budget, first).tolist())
    assert found in members(budget)
    assert value(found) == pytest.approx(min(map(value, members(budget))), abs=1e-12)


@pytest.mark.parametrize("budget", BUDGETS)
def test_best_additive_of_many_tables_is_that_of_each(budget: ExpertBudget) -> None:
    first = min(budget.lows)
    shape = (2, 3, budget.num_layers, max(budget.highs) - first + 1)
    tables = np.random.default_rng(0).normal(size=shape)
    found = best_additive(tables, budget, first)
    assert found.shape == (2, 3, budget.num_layers)
    for at in np.ndindex(2, 3):
        assert (found[at] == best_additive(tables[at], budget, first)).all()


@settings(deadline=None)
@given(st.sampled_from(BUDGETS), st.integers(0, 2**32), st.sampled_from([0.1, 3.0, 100.0]))
def test_rounded_rows_are_members_and_members_stay(
    budget: ExpertBudget, seed: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    space = Space(budget, ())
    rows = space.rounded(rng.normal(2, spread, size=(8, budget.num_layers)))
    assert all(Allocation(row) in budget for row in rows.tolist())
    own = np.array([budget.uniform(rng).experts for _ in range(4)])
    assert (space.rounded(own.astype(float)) == own).all()


@pytest.mark.parametrize("budget", BUDGETS)
def test_moves_are_the_neighbours(budget: ExpertBudget) -> None:
    rng = np.random.default_rng(0)
    start = budget.uniform(rng)
    space = Space(budget, ())
    moved = space.moves(np.array(start.experts), rng)
    assert sorted(map(tuple, moved.tolist())) == sorted(
        near.experts for near in budget.neighbours(start)
    )
    far = space.moves(np.array(start.experts), rng, experts=3, most=5)
    assert len(far) <= 5
    assert all(Allocation(row) in budget for row in far.tolist())


def test_descend_ends_where_no_move_helps() -> None:
    budget = ExpertBudget(6, 24, 1, 8)
    rng = np.random.default_rng(0)
    wanted = np.array([1, 1, 2, 5, 7, 8])
    found = Space(budget, ()).descend(
        lambda n: ((n - wanted) ** 2.0).sum(axis=1), np.array([4] * 6), rng
    )
    assert (found == wanted).all()


@pytest.mark.parametrize("budget", BUDGETS)
def test_first_free_takes_the_rank_then_neighbours_then_anything(budget: ExpertBudget) -> None:
    rng = np.random.default_rng(0)
    everything = [Allocation(experts) for experts in members(budget)]
    ranked = np.array([a.experts for a in everything[:2]])
    assert Space(budget, ()).first_free(ranked, rng) == everything[0]
    if len(everything) > 1:
        assert Space(budget, everything[:1]).first_free(ranked, rng) == everything[1]
    for last in everything:
        taken = [a for a in everything if a != last]
        assert Space(budget, taken).first_free(ranked, rng) == last
