"""Allocations as Optuna parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import IntDistribution

from mola.allocation import Allocation, ExpertBudget
from studies import encoding


@given(st.lists(st.integers(0, 12), min_size=1, max_size=130))
def test_params_keep_the_allocation_and_sort_by_layer(experts: list[int]) -> None:
    params = encoding.to_params(Allocation(experts))
    assert [params[name] for name in sorted(params)] == experts
    shuffled = dict(sorted(params.items(), reverse=True))
    assert encoding.from_params(shuffled) == Allocation(experts)


def test_names_are_zero_padded_to_the_depth() -> None:
    assert list(encoding.to_params(Allocation([1, 1]))) == ["experts_00", "experts_01"]
    assert list(encoding.to_params(Allocation([1] * 126)))[-1] == "experts_125"


def test_distributions_carry_each_layers_bounds() -> None:
    assert encoding.distributions(ExpertBudget(2, 5, [1, 2], [4, 2])) == {
        "experts_00": IntDistribution(1, 4),
        "experts_01": IntDistribution(2, 2),
    }


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "none at all"),
        ({"experts_00": 1, "experts_02": 1}, "got experts_02"),
        ({"experts_0": 1}, "got experts_0"),
        ({"experts_00": 1, "lr": 2}, "got lr"),
        ({"experts_00": 1.0}, "must be an integer"),
        ({"experts_00": True}, "must be an integer"),
    ],
)
def test_params_that_are_no_allocation_are_refused(params: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoding.from_params(params)
