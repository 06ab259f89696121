"""The named allocations at their own depth and at others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mola.allocation import Allocation, ExpertBudget
from search.priors.named import NAMES, named, named_allocations


@pytest.mark.parametrize("name", NAMES)
def test_named_allocations_are_exact_on_32_layers(name: str) -> None:
    budget = ExpertBudget(32, 160)
    assert named(name, budget) == Allocation([int(digit) for digit in name for _ in range(8)])


@given(st.integers(1, 130), st.integers(0, 3), st.integers(0, 400))
def test_named_allocations_fit_any_budget(num_layers: int, low: int, spare: int) -> None:
    budget = ExpertBudget(num_layers, low * num_layers + spare, low)
    assert all(named(name, budget) in budget for name in NAMES)


@pytest.mark.parametrize("num_layers", [12, 18, 28, 30, 126])
def test_symmetric_shapes_stay_symmetric(num_layers: int) -> None:
    budget = ExpertBudget(num_layers, 5 * num_layers)
    for name in ("2882", "8228"):
        experts = named(name, budget).experts
        # Only the rounding of the last few experts may tell both ends apart.
        assert max(abs(a - b) for a, b in zip(experts, reversed(experts), strict=True)) <= 1
    assert sum(named("2468", budget).experts[: num_layers // 2]) < 2.5 * num_layers


def test_counts_follow_the_largest_remainder() -> None:
    # 2468 over 4 layers with 10 experts: 1, 2, 3, 4; with 11: 1.1, 2.2, 3.3, 4.4.
    assert named("2468", ExpertBudget(4, 10)).experts == (1, 2, 3, 4)
    assert named("2468", ExpertBudget(4, 11)).experts == (1, 2, 3, 5)


def test_bounds_cut_a_shape_to_the_closest_member() -> None:
    assert named("2468", ExpertBudget(4, 20, 4, 6)).experts == (4, 4, 6, 6)


def test_names_that_mean_the_same_allocation_are_joined() -> None:
    found = named_allocations(ExpertBudget(4, 4))
    assert found == {Allocation([1, 1, 1, 1]): NAMES}
    distinct = named_allocations(ExpertBudget(32, 160))
    assert list(distinct.values()) == [(name,) for name in NAMES]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown allocation '1234'; expected one of 5555, 2468"):
        named("1234", ExpertBudget(4, 20))
