"""Allocations and budgets: properties, and values against enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from copy import deepcopy
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mola.allocation import Allocation, ExpertBudget

counts = st.lists(st.integers(0, 12), min_size=1, max_size=40)


@st.composite
def budgets(draw: st.DrawFn, max_layers: int = 6, max_count: int = 5) -> ExpertBudget:
    """Budgets small enough to enumerate, with bounds of their own per layer or in common."""
    num_layers = draw(st.integers(1, max_layers))
    if draw(st.booleans()):
        low = draw(st.integers(0, max_count))
        lows = [low] * num_layers
        highs = [draw(st.integers(low, max_count))] * num_layers
    else:
        lows = [draw(st.integers(0, max_count)) for _ in range(num_layers)]
        highs = [draw(st.integers(low, max_count)) for low in lows]
    total = draw(st.integers(sum(lows), sum(highs)))
    return ExpertBudget(num_layers, total, lows, highs)


def members(budget: ExpertBudget) -> list[Allocation]:
    """Enumerate a budget by filtering the whole box, in ascending order."""
    ranges = [range(a, b + 1) for a, b in zip(budget.lows, budget.highs, strict=True)]
    return [Allocation(n) for n in itertools.product(*ranges) if sum(n) == budget.total]


@given(counts)
def test_parse_reads_what_str_writes(experts: list[int]) -> None:
    allocation = Allocation(experts)
    assert Allocation.parse(str(allocation)) == allocation
    assert Allocation.parse(",".join(map(str, experts))) == allocation
    assert Allocation.parse(json.dumps(experts)) == allocation


@pytest.mark.parametrize(
    ("text", "experts"),
    [
        ("2,2,4", (2, 2, 4)),
        ("2, 2 , 4", (2, 2, 4)),
        ("[2, 2, 4]", (2, 2, 4)),
        (" 2x8 4x8 6x8 8x8\n", (2,) * 8 + (4,) * 8 + (6,) * 8 + (8,) * 8),
        ("2x2,4", (2, 2, 4)),
        ("0x1 7x1", (0, 7)),
        ("5", (5,)),
    ],
)
def test_parse_reads_lists_and_runs(text: str, experts: tuple[int, ...]) -> None:
    assert Allocation.parse(text).experts == experts


@pytest.mark.parametrize(
    "text",
    ["", "[]", "  ", "2x", "x2", "2x0", "2,,4", "-1", "2.5", "[2,2", "2 x 8", "two", "2x8x2", "²"],
)
def test_parse_refuses_other_text_and_quotes_it(text: str) -> None:
    with pytest.raises(ValueError, match="the allocation") as error:
        Allocation.parse(text)
    assert repr(text) in str(error.value)


def test_parse_refuses_a_mistyped_repeat_before_filling_the_memory() -> None:
    with pytest.raises(ValueError, match="more than 10000 layers"):
        Allocation.parse("2x99999999999999")


def test_str_is_the_run_length_form() -> None:
    allocation = Allocation([2] * 8 + [4] * 8 + [6] * 8 + [8] * 8)
    assert str(allocation) == "2x8 4x8 6x8 8x8"
    assert str(Allocation([3, 1, 1, 0])) == "3 1x2 0"


def test_counts_become_python_ints() -> None:
    allocation = Allocation(np.array([2, 3], dtype=np.int16))
    assert [type(n) for n in allocation.experts] == [int, int]
    assert json.dumps(dataclasses.asdict(allocation)) == '{"experts": [2, 3]}'
    assert (allocation.total, allocation.num_layers) == (5, 2)


@pytest.mark.parametrize(
    "experts",
    [[], [1, -1], [1, 2.0], [True, 2], ["1", "2"], "12", [None], np.array([1.0, 2.0]), [np.True_]],
)
def test_counts_must_be_integers_of_at_least_zero(experts: list[int]) -> None:
    with pytest.raises(ValueError, match="expert"):
        Allocation(experts)


def test_an_allocation_is_a_value() -> None:
    a, b = Allocation([1, 2]), Allocation((1, 2))
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert deepcopy(a) == a
    assert sorted([Allocation([2, 1]), a]) == [a, Allocation([2, 1])]
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.experts = (3,)  # type: ignore[misc]


def test_high_defaults_to_twice_the_mean_rounded_up() -> None:
    assert ExpertBudget(32, 160).high == 10
    assert ExpertBudget(4, 9).high == 5
    assert ExpertBudget(3, 0, low=0).high == 0


def test_a_total_out_of_reach_names_the_feasible_range() -> None:
    with pytest.raises(ValueError) as error:
        ExpertBudget(32, 40, 2, 8)
    assert str(error.value) == (
        "total=40 is out of reach for 32 layers with 2 to 8 experts each (64 to 256); "
        "change --budget, --min-experts or --max-experts"
    )
    with pytest.raises(ValueError, match=r"1-2 to 4 experts each \(4 to 12\)"):
        ExpertBudget(3, 13, [1, 2, 1], 4)
    with pytest.raises(ValueError, match=r"at least 2 experts each \(64 or more\)"):
        ExpertBudget(32, 40, 2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, 4), "num_layers must be 1 to 10000"),
        ((4, True), "total must be an integer"),
        ((4, 16.0), "total must be an integer"),
        ((4, 16, -1), "low must be at least 0"),
        ((4, 16, [1, 2]), "expected 4, got 2"),
        ((4, 16, 1, [8, 8, 8, 2.5]), "high of layer 3 must be an integer"),
        ((3, 12, [1, 5, 1], [8, 4, 8]), "layer 1 has low=5 above high=4; change"),
        ((3, 12, [1, 9, 1]), "layer 1 has low=9 above high=8 .twice the mean"),
        ((4, 16, "1"), "low must be an integer"),
    ],
)
def test_wrong_bounds_are_refused(args: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertBudget(*args)


def test_equal_bounds_make_equal_budgets() -> None:
    assert ExpertBudget(2, 8, [1, 1], (8, 8)) == ExpertBudget(2, 8, 1, 8)
    budget = ExpertBudget(2, 8, [1, 2], 8)
    assert (budget.low, budget.lows, budget.highs) == ((1, 2), (1, 2), (8, 8))
    assert json.loads(json.dumps(dataclasses.asdict(budget)))["low"] == [1, 2]


@settings(deadline=None)  # enumerates
@given(budgets())
def test_size_and_member_enumerate_the_budget(budget: ExpertBudget) -> None:
    expected = members(budget)
    assert budget.size() == len(expected)
    assert [budget.member(rank) for rank in range(len(expected))] == expected
    assert all(allocation in budget for allocation in expected)
    with pytest.raises(ValueError, match="rank must be 0 to"):
        budget.member(len(expected))


def test_membership_needs_depth_total_and_bounds() -> None:
    budget = ExpertBudget(3, 6, 1, 3)
    assert Allocation([1, 2, 3]) in budget
    for experts in ([3, 3], [1, 1, 3], [0, 3, 3], [1, 1, 4], [1, 1, 1, 3]):
        assert Allocation(experts) not in budget
    assert (1, 2, 3) not in budget


def test_size_is_exact_beyond_floats() -> None:
    # Inclusion-exclusion over the layers that exceed their bound.
    expected = sum(
        (-1) ** k * math.comb(32, k) * math.comb(128 - 10 * k + 31, 31) for k in range(13)
    )
    assert ExpertBudget(32, 160, 1, 10).size() == expected
    assert expected > 2**53


def test_uniform_draws_every_member_alike() -> None:
    budget = ExpertBudget(4, 8, [0, 1, 1, 2], 4)
    expected = members(budget)
    rng, draws = np.random.default_rng(1), 200 * len(expected)
    seen = dict.fromkeys(expected, 0)
    for _ in range(draws):
        seen[budget.uniform(rng)] += 1
    df = len(expected) - 1
    chi2 = sum((n - 200) ** 2 / 200 for n in seen.values())
    # Wilson-Hilferty: 4.9 standard deviations, false failure below 1e-6 (and the seed is fixed).
    z = ((chi2 / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    assert abs(z) < 4.9


@given(budgets(), st.integers(0, 2**32))
def test_uniform_stays_in_the_budget_and_follows_the_generator(
    budget: ExpertBudget, seed: int
) -> None:
    first = [budget.uniform(rng) for rng in [np.random.default_rng(seed)] for _ in range(5)]
    rng = np.random.default_rng(seed)
    assert first == [budget.uniform(rng) for _ in range(5)]
    assert all(allocation in budget for allocation in first)


@settings(deadline=None)  # enumerates
@given(st.data())
def test_project_finds_the_closest_member(data: st.DataObject) -> None:
    budget = data.draw(budgets(max_layers=5, max_count=4))
    # Halves make ties common; other floats make near-ties.
    weight = st.integers(-4, 14).map(lambda k: k / 2) | st.floats(-3, 8)
    weights = data.draw(st.lists(weight, min_size=budget.num_layers, max_size=budget.num_layers))
    projected = budget.project(weights)

    def distance(allocation: Allocation) -> Fraction:
        return Fraction(
            sum((n - Fraction(w)) ** 2 for n, w in zip(allocation.experts, weights, strict=True))
        )

    # Ties go to the lower layers: among the closest, the lexicographically largest.
    least = min(map(distance, members(budget)))
    assert projected == max(a for a in members(budget) if distance(a) == least)


@given(budgets(), st.integers(0, 2**32))
def test_project_leaves_members_as_they_are(budget: ExpertBudget, seed: int) -> None:
    member = budget.uniform(np.random.default_rng(seed))
    assert budget.project(member.experts) == member
    assert budget.project(np.array(member.experts, dtype=np.float32)) == member


def test_project_gives_ties_to_the_lower_layers() -> None:
    assert ExpertBudget(4, 6, 1, 3).project([1.5] * 4).experts == (2, 2, 1, 1)
    assert ExpertBudget(3, 5, 1, 3).project([0, 0, 0]).experts == (2, 2, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "x"])
def test_project_refuses_weights_that_are_not_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="weight of layer 1 must be a finite number"):
        ExpertBudget(3, 6).project([1.0, bad, 2.0])


def test_project_needs_a_weight_per_layer() -> None:
    with pytest.raises(ValueError, match="expected 3 weights, one per layer, got 2"):
        ExpertBudget(3, 6).project([1.0, 2.0])


@settings(deadline=None)  # enumerates
@given(budgets(max_layers=4), st.integers(0, 2**32))
def test_neighbours_are_the_members_one_move_away(budget: ExpertBudget, seed: int) -> None:
    centre = budget.uniform(np.random.default_rng(seed))

    def moved(other: Allocation) -> int:
        return sum(abs(a - b) for a, b in zip(centre.experts, other.experts, strict=True))

    found = list(budget.neighbours(centre))
    assert sorted(found) == [a for a in members(budget) if moved(a) == 2]


def test_deep_models_with_large_budgets_work() -> None:
    budget = ExpertBudget(126, 630)
    rng = np.random.default_rng(0)
    assert budget.size() > 10**120
    assert all(budget.uniform(rng) in budget for _ in range(10))
    assert budget.project(rng.normal(5, 4, size=126)) in budget


def test_a_layer_has_at_most_4096_experts() -> None:
    assert Allocation([4096, 0]).total == 4096
    for refused in (
        lambda: Allocation([1, 4097]),
        lambda: Allocation.parse("1 4097"),
        lambda: ExpertBudget(2, 9, 0, [1, 4097]),
        lambda: ExpertBudget(2, 9000, 0, 4097),
        lambda: ExpertBudget(2, 9000, 4097),
    ):
        with pytest.raises(ValueError, match="must be at most 4096, got 4097"):
            refused()
    with pytest.raises(ValueError, match=r"total=5000 is out of reach .* 0 to 4096 experts each"):
        ExpertBudget(1, 5000, 0)
    assert ExpertBudget(1, 4096).high == 4096


def test_a_number_of_thousands_of_digits_is_told_in_words() -> None:
    with pytest.raises(ValueError, match="at most 4096, got a number of more than 30 digits"):
        Allocation([10**5000])
    with pytest.raises(ValueError, match="at least 0, got a number of more than 30 digits"):
        Allocation([-(10**5000)])
    with pytest.raises(ValueError, match=f"at most 4096, got {10**30 - 1}$"):
        Allocation([10**30 - 1])


def test_a_budget_that_cannot_be_counted_is_refused_at_once() -> None:
    assert ExpertBudget(500, 3999, 0).total == 3999  # a table of 500 times 4000 numbers
    with pytest.raises(ValueError, match="leaves 4000 experts to place in 500 layers, .* 4000 are"):
        ExpertBudget(500, 4000, 0)
    assert ExpertBudget(500, 4499, 1).total == 4499
    with pytest.raises(ValueError, match="leaves 4000 experts to place"):
        ExpertBudget(500, 4500, 1)
    with pytest.raises(ValueError, match="is out of reach for 32 layers"):
        ExpertBudget(32, 10**18)


@pytest.mark.parametrize("text", ["x" * 10**6, "1 " * 20_000, "9" * 10**6, "1x" + "9" * 10**5])
def test_a_long_text_is_told_in_a_short_line(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        Allocation.parse(text)
    assert len(str(caught.value)) < 300
