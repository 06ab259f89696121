"""Bounds learnt from failures: what they see, and what they leave alone."""

from __future__ import annotations

import numpy as np

from mola.allocation import ExpertBudget
from search.sampler.failures import without_failures

BUDGET = ExpertBudget(4, 20, 1, 9)


def rows(*allocations: list[int]) -> np.ndarray:
    return np.array(allocations, dtype=np.int64).reshape(-1, 4)


def test_the_largest_layer_is_bounded_below_what_fails() -> None:
    failed = rows([9, 9, 1, 1], [1, 9, 1, 9], [1, 1, 8, 10])
    finished = rows([5, 5, 5, 5], [7, 7, 3, 3], [3, 3, 7, 7])
    assert without_failures(BUDGET, failed, finished).highs == (8, 8, 8, 8)


def test_one_layers_bound_leaves_the_others() -> None:
    failed = rows([2, 8, 8, 2], [8, 8, 2, 2], [2, 8, 2, 8])
    finished = rows([8, 2, 2, 8], [2, 2, 8, 8], [9, 2, 2, 7], [2, 4, 5, 9])
    assert without_failures(BUDGET, failed, finished).highs == (9, 7, 9, 9)


def test_failures_without_a_pattern_change_nothing() -> None:
    failed = rows([5, 5, 5, 5], [8, 2, 8, 2], [2, 8, 2, 8])
    finished = rows([9, 1, 9, 1], [1, 9, 1, 9], [9, 9, 1, 1], [1, 1, 9, 9], [6, 5, 5, 4])
    assert without_failures(BUDGET, failed, finished) == BUDGET


def test_what_the_largest_layer_explains_bounds_no_other() -> None:
    failed = rows([9, 5, 3, 3], [9, 6, 3, 2], [9, 5, 2, 4])
    finished = rows([5, 4, 6, 5], [6, 3, 5, 6], [7, 2, 7, 4])
    assert without_failures(BUDGET, failed, finished).highs == (8, 8, 8, 8)


def test_of_two_bounds_that_explain_as_much_the_largest_is_taken() -> None:
    failed = rows([8, 8, 2, 2], [9, 9, 1, 1], [1, 9, 9, 1], [1, 1, 9, 9])
    finished = rows([2, 8, 2, 8])
    assert without_failures(BUDGET, failed, finished).highs == (8, 8, 8, 8)


def test_numbers_with_which_many_finish_are_no_bound() -> None:
    failed = rows([9, 1, 1, 9], [1, 9, 9, 1], [9, 9, 1, 1])
    finished = rows([1, 1, 9, 9], [9, 1, 9, 1])
    assert without_failures(BUDGET, failed, finished) == BUDGET


def test_two_failures_are_not_enough() -> None:
    failed = rows([9, 9, 1, 1], [1, 9, 1, 9])
    assert without_failures(BUDGET, failed, rows([5, 5, 5, 5])) == BUDGET


def test_bounds_that_would_leave_nothing_are_not_set() -> None:
    failed = rows([5, 5, 5, 5], [6, 5, 5, 4], [5, 6, 4, 5])
    assert without_failures(BUDGET, failed, rows()) == BUDGET
