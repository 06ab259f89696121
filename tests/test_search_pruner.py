"""Pruners: what they learn from other trials' rungs, and whom they stop."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from search.pruner import (
    PRUNERS,
    LearntPruner,
    PairedMedianPruner,
    ends_behind,
    make_pruner,
)
from search.sampler.rungs import Passed, passed_rung
from studies.records import SEED_ATTR

RUNG, END = 2, 4
POOR, FAIR = 3.0, -0.5  # at the rung, in standard deviations of the others


def trial(
    at_rung: float, at_end: float | None, seed: int = 0, state: TrialState = TrialState.COMPLETE
) -> FrozenTrial:
    return create_trial(
        state=state,
        value=at_end,
        intermediate_values={RUNG: at_rung},
        user_attrs={SEED_ATTR: seed},
    )


def study_of(trials: list[FrozenTrial]) -> optuna.Study:
    study = optuna.create_study()
    study.add_trials(trials)
    return study


def judged(at_rung: float, seed: int = 0) -> FrozenTrial:
    return trial(at_rung, None, seed, TrialState.RUNNING)


def others(
    correlation: float, number: int = 24, seed: int = 0, shift: float = 0
) -> list[FrozenTrial]:
    """Complete trials whose rungs tell so much of their ends."""
    rng = np.random.default_rng(5)
    at_rung = rng.standard_normal(number)
    rest = rng.standard_normal(number)
    at_end = correlation * at_rung + np.sqrt(1 - correlation**2) * rest
    return [trial(r + shift, e + shift, seed) for r, e in zip(at_rung, at_end, strict=True)]


def test_a_rung_that_tells_prunes_the_poor_and_spares_the_fair():
    study, pruner = study_of(others(correlation=0.95)), LearntPruner()
    assert pruner.prune(study, judged(POOR))
    assert not pruner.prune(study, judged(FAIR))


@pytest.mark.parametrize("correlation", [0.0, -0.95])
def test_a_rung_that_tells_nothing_prunes_nobody(correlation):
    """Neither the poor at the rung nor, where orders are reversed, the good."""
    study, pruner = study_of(others(correlation)), LearntPruner()
    assert not any(pruner.prune(study, judged(value)) for value in (-POOR, FAIR, POOR))


def test_nothing_is_pruned_before_enough_trials_ran_to_their_end():
    trials = others(correlation=0.95)
    pruned = [trial(value, None, state=TrialState.PRUNED) for value in (1.0, 1.1, 1.2)]
    assert not LearntPruner(startup=8).prune(study_of(trials[:7] + pruned), judged(POOR))
    assert LearntPruner(startup=7).prune(study_of(trials[:7] + pruned), judged(POOR))


@pytest.mark.parametrize("pruner", [LearntPruner(), PairedMedianPruner()])
def test_only_trials_of_the_same_seed_are_compared(pruner):
    """Those of another seed are all worse, by far more than allocations differ."""
    study = study_of(
        [*others(correlation=0.95), *others(correlation=0.95, number=48, seed=1, shift=100.0)]
    )
    assert pruner.prune(study, judged(POOR))
    assert not pruner.prune(study, judged(100.0 + FAIR, seed=1))
    assert pruner.prune(study, judged(100.0 + POOR, seed=1))


def test_the_median_pruner_counts_pruned_trials():
    """Without them the median would creep to the survivors', and prune ever more."""
    good = [trial(value, value) for value in (0.1, 0.2, 0.3, 0.4)]
    poor = [trial(value, None, state=TrialState.PRUNED) for value in (1.1, 1.2, 1.3, 1.4)]
    pruner = PairedMedianPruner(startup=8)
    assert not pruner.prune(study_of(good + poor), judged(0.5))
    assert pruner.prune(study_of(good + poor), judged(1.0))


@pytest.mark.parametrize("pruner", [LearntPruner(), PairedMedianPruner()])
def test_a_trial_without_a_rung_goes_on(pruner):
    alone = create_trial(state=TrialState.RUNNING)
    assert not pruner.prune(study_of(others(correlation=0.95)), alone)


def test_a_value_that_is_not_finite_at_a_rung_does_not_enter_the_regression():
    trials = [*others(correlation=0.95), trial(float("inf"), 1.0), trial(float("nan"), 1.0)]
    passed = passed_rung(trials, RUNG, fewest=3)
    assert passed is not None
    assert len(passed.at_rung) == 24


def test_the_extrapolation_is_the_least_squares_line_with_its_prediction_variance():
    x, y = np.array([0.0, 1.0, 2.0, 5.0]), np.array([1.0, 2.0, 2.5, 6.0])
    design = np.stack([np.ones(4), x], axis=1)
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    noise = float(((y - design @ coefficients) ** 2).sum()) / 2
    at = np.array([1.0, 3.0])
    expected = noise * (1 + at @ np.linalg.inv(design.T @ design) @ at)
    mean, variance = Passed(x, y).extrapolate(3.0)
    assert mean == pytest.approx(float(coefficients @ at))
    assert variance == pytest.approx(float(expected))


def test_equal_values_at_a_rung_say_nothing():
    same = Passed(np.ones(8), np.arange(8.0))
    assert same.extrapolate(1.0)[0] == pytest.approx(3.5)
    assert not ends_behind(1.0, same)


@pytest.mark.parametrize("name", PRUNERS)
def test_a_pruner_is_made_by_its_name(name):
    assert isinstance(make_pruner(name), optuna.pruners.BasePruner)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="unknown pruner 'best'; expected one of learnt, median"):
        make_pruner("best")
