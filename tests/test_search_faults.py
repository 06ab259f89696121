"""Hanging trials, wrong numbers, too little memory, Ray's end: what the driver makes of them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter

import pytest
from pretend_pool import PretendPool, finished, train
from test_search_driver import RULES, SPEC, drive, fresh_study, own

import search.driver
import search.trials
from mola.allocation import Allocation
from mola.events import Event, Rung
from mola.settings import AdapterSettings, TrainSettings, with_less_memory
from search.deadline import LEAST_SECONDS, SILENT_SECONDS, Deadline
from search.priors.named import named
from search.trials import TooManyFailuresError
from search.workers.clock import LONGEST_GAP_SECONDS, AwakeClock
from search.workers.pool import Failed, Job, PoolError
from search.workers.ray_runtime import PACKAGES, _wants_token, connect
from studies.store import fail, records

UNLUCKY = named("2468", SPEC.budget)


class Beating:
    """A clock on which each look is a second after the last."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def look(self) -> float:
        self.seconds += 1
        return self.seconds


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.trials, "AwakeClock", Beating)


def first_time_only(wrong: list[Event | Failed]) -> PretendPool:
    """A pool in which one allocation goes wrong at its first try."""
    tries = Counter[Allocation]()

    def script(job: Job) -> list[Event | Failed]:
        tries[job.allocation] += 1
        return wrong if job.allocation == UNLUCKY and tries[UNLUCKY] == 1 else train(job)

    return PretendPool(script=script)


@pytest.mark.usefixtures("beats")
def test_a_trial_that_takes_too_long_is_killed_and_runs_again_once() -> None:
    study, pool = fresh_study(), first_time_only([])
    drive(study, pool, dataclasses.replace(RULES, trial_timeout=100))
    first, second = (r for r in records(study) if r.allocation == UNLUCKY and r.seed == SPEC.seed)
    assert pool.killed == [first.number]
    assert first.reason == "no result after 100 s (--trial-timeout), its worker was ended"
    assert (first.state, second.state, second.retry_of) == ("FAIL", "COMPLETE", first.number)
    assert len(own(study)) == RULES.trials


@pytest.mark.usefixtures("beats")
def test_an_allocation_that_always_hangs_is_replaced_by_another() -> None:
    def script(job: Job) -> list[Event | Failed]:
        return [] if job.allocation == UNLUCKY else train(job)

    study, pool = fresh_study(), PretendPool(script=script)
    drive(study, pool, dataclasses.replace(RULES, trial_timeout=100))
    assert sum(job.allocation == UNLUCKY for job in pool.jobs) == len(pool.killed) == 2
    assert len(own(study)) == RULES.trials


@pytest.mark.usefixtures("beats")
def test_if_all_trials_hang_the_search_stops() -> None:
    study = fresh_study()
    with pytest.raises(TooManyFailuresError, match="5 trials failed in a row.*no result after"):
        drive(
            study, PretendPool(script=lambda job: []), dataclasses.replace(RULES, trial_timeout=9)
        )
    assert not [r for r in records(study) if r.state == "RUNNING"]


def test_a_deadline_is_learnt_from_the_slowest_and_never_short() -> None:
    deadline = Deadline()
    assert deadline.overdue(running=1e6, silent=SILENT_SECONDS) is None
    assert "nothing heard" in str(deadline.overdue(running=1e6, silent=SILENT_SECONDS + 1))
    deadline.learn(3.0)
    assert "nothing heard" in str(deadline.overdue(LEAST_SECONDS, silent=SILENT_SECONDS + 1))
    assert deadline.overdue(LEAST_SECONDS, silent=LEAST_SECONDS) is None
    assert "no result after 600 s" in str(deadline.overdue(LEAST_SECONDS + 1, 0))
    deadline.learn(3600.0)
    deadline.learn(2.0)
    assert deadline.overdue(36_000.0, silent=3600.0) is None
    assert "nothing heard of it for 3600 s" in str(deadline.overdue(3700.0, silent=3601.0))
    assert deadline.overdue(36_001.0, silent=0) is not None
    assert Deadline(fixed=5).overdue(6, 0) is not None


def test_the_deadline_of_a_search_that_goes_on_knows_the_trials_so_far() -> None:
    study = fresh_study()
    slow = dataclasses.replace(finished(1.0), train_seconds=500.0, eval_seconds=100.0)
    drive(
        study, PretendPool(script=lambda job: [slow]), dataclasses.replace(RULES, confirm_seeds=0)
    )
    driver = search.driver.Driver(study, SPEC, PretendPool, RULES)
    driver.run()
    assert driver.trials._deadline.slowest == 600.0


def test_neither_a_jump_nor_a_suspension_makes_the_time_awake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 0.0)  # a clock on the wall is not asked
    clock = AwakeClock()
    now[0] += 2
    assert clock.look() == 2
    now[0] += 8 * 3600  # the laptop was closed over night
    assert clock.look() == 2 + LONGEST_GAP_SECONDS


@pytest.mark.parametrize("accuracy", [math.nan, math.inf])
def test_an_accuracy_that_is_not_finite_fails_the_trial(accuracy: float) -> None:
    study = fresh_study()
    pool = first_time_only([dataclasses.replace(finished(1.0), accuracy=accuracy)])
    drive(study, pool, RULES)
    (record,) = (r for r in records(study) if r.state == "FAIL")
    assert record.reason == "the accuracy is not a finite number at step 4"
    assert len(own(study)) == RULES.trials


def test_after_too_little_memory_a_trial_runs_once_more_with_less() -> None:
    study = fresh_study()
    pool = first_time_only([Failed("out of GPU memory", out_of_memory=True)])
    drive(study, pool, RULES)
    tries = [job for job in pool.jobs if job.allocation == UNLUCKY and job.seed == SPEC.seed]
    assert [job.save_memory for job in tries] == [False, True]
    assert sum(job.save_memory for job in pool.jobs) == 1
    first, second = (r for r in records(study) if r.allocation == UNLUCKY and r.seed == SPEC.seed)
    assert (first.reason, second.state) == ("out of GPU memory", "COMPLETE")


def test_a_thrifty_trial_that_is_interrupted_stays_thrifty() -> None:
    study = fresh_study()
    study.enqueue_trial({f"experts_0{i}": n for i, n in enumerate(UNLUCKY.experts)})
    fail(study, study.ask(), "out of GPU memory", retry=True, save_memory=True)
    pool = first_time_only([Failed("Ray's own process died", blameless=True)])
    drive(study, pool, RULES)
    tries = [job for job in pool.jobs if job.allocation == UNLUCKY and job.seed == SPEC.seed]
    assert [job.save_memory for job in tries] == [True, True]


def test_the_end_of_ray_is_nobodys_fault() -> None:
    """All that ran start again, as often as it takes, and no failure in a row is counted."""
    deaths = Counter[Allocation]()

    def script(job: Job) -> list[Event | Failed]:
        deaths[job.allocation] += 1
        return [Failed("Ray died", blameless=True)] if deaths[job.allocation] < 4 else train(job)

    study = fresh_study()
    drive(study, PretendPool(script=script), dataclasses.replace(RULES, max_failures=2))
    assert len(own(study)) == RULES.trials
    assert {r.reason for r in records(study) if r.state == "FAIL"} == {"Ray died"}


def test_a_cluster_is_given_the_packages_from_where_they_are() -> None:
    assert all((PACKAGES / name / "__init__.py").exists() for name in ("mola", "studies", "search"))


def test_a_ray_that_is_too_slow_to_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def slow(**_: object) -> None:
        raise Exception("The current node timed\nout during startup.")  # as Ray does

    monkeypatch.setattr(ray, "init", slow)
    with pytest.raises(PoolError, match="cannot start Ray on this machine: The current node timed"):
        connect(None)
    with pytest.raises(ValueError, match="--address auto: cannot join the cluster: The current"):
        connect("auto")


def test_a_ray_client_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("ray://head:10001", "http://head:8265"):
        with pytest.raises(
            ValueError, match=f"^--address {address}: a search does not run"
        ) as said:
            connect(address)
        assert len(str(said.value).splitlines()) == 1
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")  # which auto is
    with pytest.raises(ValueError, match="^--address ray://head:10001: a search does not run"):
        connect("auto")


def test_a_cluster_that_wants_a_token_is_recognised() -> None:
    text = "Last connection error: ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken"
    refused, gone = ConnectionError("Failed to connect"), ConnectionError("Failed to connect")
    refused.__cause__, gone.__cause__ = RuntimeError(text), RuntimeError("timed out")
    assert _wants_token(refused)
    assert not _wants_token(gone)


def test_a_rung_that_is_not_finite_is_named() -> None:
    study = fresh_study()
    drive(study, first_time_only([Rung(2, 1.0, math.nan)]), RULES)
    (record,) = (r for r in records(study) if r.state == "FAIL")
    assert record.reason == "the accuracy is not a finite number at step 2"


def test_less_memory_halves_the_micro_batch_only_where_that_changes_nothing() -> None:
    train = TrainSettings(batch_size=8)
    exact, noisy = AdapterSettings(lora_dropout=0), AdapterSettings(lora_dropout=0.05)
    balanced = AdapterSettings(lora_dropout=0, router_aux_loss_coef=0.1)
    assert with_less_memory(train, exact).micro_batch == 4
    assert with_less_memory(with_less_memory(train, exact), exact).micro_batch == 2
    assert with_less_memory(TrainSettings(batch_size=1), exact).micro_batch == 1
    for adapter in (noisy, balanced):
        assert with_less_memory(train, adapter) == dataclasses.replace(
            train, gradient_checkpointing=True
        )
