"""Who runs again, who wins, and which claim the numbers bear."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mola.allocation import Allocation
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from search.conclude import candidates, conclude, fresh_seeds
from search.priors.named import named
from studies.records import TrialRecord
from studies.spec import StudySpec

SPEC = StudySpec(
    num_layers=4,
    total=12,
    low=1,
    high=6,
    model=ModelSource(),
    model_fingerprint="m",
    data="pretence",
    data_fingerprint="d",
    prompt_template=None,
    max_length=64,
    adapter=AdapterSettings(),
    train=TrainSettings(),
    rungs=(),
    seed=0,
    objective="nats per row",
)
UNIFORM = named("5555", SPEC.budget)
TRIANGLE = named("2468", SPEC.budget)
FOUND = Allocation([6, 4, 1, 1])
OTHER = Allocation([5, 5, 1, 1])


def trials(
    values: Mapping[Allocation, Sequence[float | None]], state: str = "COMPLETE"
) -> list[TrialRecord]:
    """A trial per allocation and seed; None: there was none."""
    return [
        TrialRecord(
            number=10 * place + seed,
            state=state,
            allocation=allocation,
            seed=seed,
            label="search" if seed == 0 else "replicate",
            objective=value,
            accuracy=0.5,
            standard_error=0.01,
            rungs={},
            seconds=1.0,
            reason="",
            retry_of=None,
        )
        for place, (allocation, by_seed) in enumerate(values.items())
        for seed, value in enumerate(by_seed)
        if value is not None
    ]


def conclusion(values: Mapping[Allocation, Sequence[float | None]]) -> dict[str, Any]:
    return conclude(trials(values), SPEC, confirm_seeds=3)


def test_the_best_and_the_named_are_run_again_uniform_first() -> None:
    records = trials({FOUND: [1.0], OTHER: [1.1], TRIANGLE: [1.3], UNIFORM: [1.2]})
    assert candidates(records, SPEC, 1, {}) == [UNIFORM, TRIANGLE, FOUND]
    assert candidates(records, SPEC, 3, {}) == [UNIFORM, TRIANGLE, FOUND, OTHER]
    assert fresh_seeds(SPEC, 3) == (1, 2, 3)


def test_the_best_are_those_of_the_estimates_and_not_the_luckiest() -> None:
    records = trials({FOUND: [1.0], OTHER: [1.1], UNIFORM: [1.2]})
    assert candidates(records, SPEC, 1, {FOUND: 1.15, OTHER: 1.05}) == [UNIFORM, OTHER]


def test_trials_that_were_pruned_or_failed_are_not_run_again() -> None:
    records = trials({UNIFORM: [1.2]})
    records += trials({FOUND: [0.1]}, "PRUNED") + trials({OTHER: [0.1]}, "FAIL")
    assert candidates(records, SPEC, 3, {}) == [UNIFORM]


def test_a_clear_winner_is_better_than_uniform() -> None:
    result = conclusion({UNIFORM: [1.20, 1.30, 1.10, 1.25], FOUND: [1.00, 1.11, 0.90, 1.04]})
    assert result["better"]
    assert result["winner"] == 10
    low, high = result["table"][0]["low"], result["table"][0]["high"]
    assert result["text"] == (
        f"better than uniform by 0.2000 nats per row, 95% interval [{low:+.4f}, {high:+.4f}], "
        "3 fresh seeds"
    )
    assert low < -0.2 < high < 0


def test_a_difference_within_the_noise_is_no_claim() -> None:
    result = conclusion({UNIFORM: [1.2, 1.3, 1.1, 1.2], FOUND: [1.0, 1.2, 1.2, 1.1]})
    assert result["winner"] == 10
    assert not result["better"]
    assert result["text"].startswith("not distinguishable from uniform: -0.0333 nats per row")


def test_the_claim_rests_on_the_fresh_seeds_alone() -> None:
    """Selected for its luck on seed 0, the winner is no better than uniform on the others."""
    result = conclusion({UNIFORM: [1.2, 1.30, 1.10, 1.25], FOUND: [0.2, 1.31, 1.09, 1.25]})
    assert result["winner"] == 10
    assert result["table"][0]["difference"] == pytest.approx(0.0, abs=1e-9)
    assert not result["better"]


def test_only_allocations_with_all_replicates_can_win() -> None:
    result = conclusion({UNIFORM: [1.2, 1.3, 1.1, 1.2], FOUND: [0.1, 0.1, None, 0.1]})
    assert result["winner"] == 0
    assert result["text"] == "uniform itself has the best mean of 1 allocations"


def test_no_claim_without_uniform() -> None:
    result = conclusion({UNIFORM: [1.2, None, 1.1, 1.2], FOUND: [1.0, 1.1, 0.9, 1.0]})
    assert result["winner"] == 10
    assert result["text"] == "not compared with uniform, which did not finish on all seeds"


def test_no_claim_without_fresh_seeds() -> None:
    records = trials({UNIFORM: [1.2], FOUND: [1.0]})
    result = conclude(records, SPEC, confirm_seeds=0)
    assert (result["winner"], result["better"], result["fresh_seeds"]) == (10, False, [])
    assert result["table"][0]["standard_error"] is None
    assert "no allocation was run again" in result["text"]


def test_nothing_finished_is_no_winner() -> None:
    result = conclude(trials({FOUND: [1.0]}, "PRUNED"), SPEC, confirm_seeds=3)
    assert (result["winner"], result["text"]) == (None, "no allocation finished")


def test_the_conclusion_is_plain_json() -> None:
    result = conclusion({UNIFORM: [1.2, 1.3, 1.1, 1.2], FOUND: [1.0, 1.1, 0.9, 1.0]})
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    row = result["table"][0]
    assert row["experts"] == [6, 4, 1, 1]
    assert row["mean"] == pytest.approx(1.0)
    assert row["standard_error"] == pytest.approx(math.sqrt(0.02 / 3 / 4))
    assert row["accuracy"] == pytest.approx(0.5)
    assert result["table"][1]["names"] == ["5555"]


def test_who_dropped_out_is_compared_on_the_seeds_it_ran_and_cannot_win() -> None:
    result = conclusion(
        {
            UNIFORM: [1.2, 1.3, 1.1, 1.2],
            FOUND: [1.1, 1.2, 1.0, 1.1],
            OTHER: [0.1, 1.9, 1.7, None],  # lucky at first, behind on the fresh seeds
        }
    )
    assert result["winner"] == 10
    last = result["table"][-1]
    assert (last["experts"], last["dropped"], last["seeds"]) == ([5, 5, 1, 1], True, 3)
    assert last["difference"] == pytest.approx(0.6)
    assert not any(row["dropped"] for row in result["table"][:-1])


def test_intervals_hold_for_all_that_set_out_and_not_for_the_survivors_alone() -> None:
    survivors = {UNIFORM: [1.2, 1.3, 1.1, 1.2], FOUND: [1.1, 1.25, 1.0, 1.1]}
    alone = conclusion(survivors)
    after_a_race = conclusion({**survivors, OTHER: [1.0, 1.9, 1.7, None]})
    assert after_a_race["table"][0]["low"] < alone["table"][0]["low"]


def test_signal_and_noise_are_those_of_the_named_allocations() -> None:
    named_two = {UNIFORM: [1.0, 1.1, 0.9, 1.0], TRIANGLE: [2.0, 2.1, 1.9, 2.1]}
    result = conclusion({**named_two, FOUND: [0.0, 5.0, 0.0, 5.0]})
    assert result["spread"]["signal"] == pytest.approx(1.025 / math.sqrt(2), rel=0.02)
    assert result["spread"]["noise"] < 0.05
    assert conclusion({UNIFORM: [1.0, 1.1, 0.9, 1.0]})["spread"] is None


def test_a_named_allocation_that_dropped_out_counts_as_signal() -> None:
    result = conclusion({UNIFORM: [1.0, 1.1, 0.9, 1.0], TRIANGLE: [2.0, 2.1, 1.9, None]})
    assert result["spread"]["signal"] == pytest.approx(1 / math.sqrt(2), rel=0.02)
