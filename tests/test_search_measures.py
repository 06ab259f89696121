"""Sums over a study's trials: the best so far, seeds, ranks, time and cost."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from pretend_study import SPEC, empty_study, objective, searched_study

from mola.allocation import Allocation
from search.full.plan import EPOCHS
from search.report.findings import Findings, read_findings
from search.report.measures import (
    best_so_far,
    cost,
    differences_by_seed,
    rank_correlation,
    time_spent,
)
from studies.records import TrialRecord

NOON = datetime(2026, 1, 1, 12)
UNIFORM = Allocation([3] * 6)


@pytest.fixture(scope="module")
def findings() -> Findings:
    return read_findings(searched_study())


def trial(number: int, start: float, end: float, **changes: object) -> TrialRecord:
    """A trial from second `start` to second `end` after noon."""
    made = TrialRecord(
        number=number,
        state="COMPLETE",
        allocation=UNIFORM,
        seed=0,
        label="search",
        objective=1.0,
        accuracy=0.5,
        standard_error=0.01,
        rungs={},
        seconds=end - start,
        reason="",
        retry_of=None,
        train_seconds=6.0,
        eval_seconds=3.0,
        began=NOON + timedelta(seconds=start),
        ended=NOON + timedelta(seconds=end),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_best_so_far_only_falls() -> None:
    values = [3.0, 4.0, 2.0, None, 2.0, 1.0]
    trials = [trial(i, 0, 1, objective=value) for i, value in enumerate(values)]
    assert best_so_far(trials) == [(0, 3.0), (2, 2.0), (5, 1.0)]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 400], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3], [1, 3, 2], 0.5),
        # ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3: 4.5 / sqrt(4.5 * 5)
        ([1, 2, 2, 3], [1, 2, 3, 4], 4.5 / (4.5 * 5) ** 0.5),
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_rank_correlation_is_spearmans(
    a: list[float], b: list[float], expected: float | None
) -> None:
    found = rank_correlation(a, b)
    assert found == (None if expected is None else pytest.approx(expected))


def test_time_is_split_without_a_rest() -> None:
    trials = [
        trial(0, 0, 10),
        trial(1, 5, 20),
        trial(2, 100, 104, state="PRUNED", train_seconds=None, eval_seconds=None),
        trial(3, 104, 105, state="RUNNING", seconds=None, ended=None),
    ]
    spent = time_spent(trials)
    assert spent is not None
    assert (spent.training, spent.evaluation) == (12.0, 6.0)
    assert spent.overhead == 10 + 15 - 18
    assert spent.cut_short == 4.0
    assert (spent.wall, spent.workers) == (24.0, 2)  # the break from 20 to 100 does not count
    assert spent.idle == 2 * 24 - (10 + 15 + 4)
    parts = spent.training + spent.evaluation + spent.overhead + spent.cut_short + spent.idle
    assert parts == spent.wall * spent.workers


def test_one_trial_that_ends_as_the_next_begins_is_one_worker() -> None:
    spent = time_spent([trial(0, 0, 10), trial(1, 10, 20)])
    assert spent is not None
    assert (spent.workers, spent.wall, spent.idle) == (1, 20.0, 0.0)


def test_nothing_over_has_cost_no_time() -> None:
    assert time_spent([]) is None
    assert cost(read_findings(empty_study())) is None


def test_cost_is_in_units_of_one_full_fine_tune(findings: Findings) -> None:
    price = cost(findings)
    assert price is not None
    complete = sum(t.state == "COMPLETE" for t in findings.trials)
    # The pruned trial and the failed one each got to the rung at step 5.
    assert price.rows == (10 * complete + 2 * 5) * SPEC.train.batch_size
    full = EPOCHS * 100
    assert price.by_rows == pytest.approx(price.rows / full)
    assert price.full_seconds == pytest.approx(3.0 / (10 * SPEC.train.batch_size) * full)


def test_differences_are_within_a_seed_and_the_fresh_ones_apart(findings: Findings) -> None:
    rows = differences_by_seed(findings)
    assert rows[0].name == findings.called(
        Allocation(findings.conclusion["table"][0]["experts"]), findings.conclusion["winner"]
    )
    assert "uniform" not in [row.name for row in rows]
    winner = Allocation(findings.conclusion["table"][0]["experts"])
    assert rows[0].chosen_by == pytest.approx(objective(winner, 0) - objective(UNIFORM, 0))
    assert rows[0].fresh == pytest.approx(
        [objective(winner, seed) - objective(UNIFORM, seed) for seed in (1, 2)]
    )
    assert rows[0].mean == pytest.approx(sum(rows[0].fresh) / 2)
