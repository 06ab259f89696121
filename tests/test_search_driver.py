"""The driver with workers that only pretend to train; restarts are on a real SQLite store."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from pathlib import Path

import optuna
import pytest
from pretend_pool import (
    KilledError,
    PretendPool,
    finished,
    no_waiting_for_the_disk,
    objective,
    train,
)

from mola.allocation import Allocation, ExpertBudget
from mola.events import Event, Rung, Step
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from search.driver import Driver, Rules
from search.patience import LEAST
from search.priors.named import named, named_allocations
from search.sampler import BudgetSampler, make_sampler
from search.trials import StopRequestedError, TooManyFailuresError
from search.updates import Ended, Note, Phase, Progress, Started, Update
from search.workers.pool import Failed, Job, Memory
from studies.records import LABEL_ATTR, SEED_ATTR, SPEC_ATTR
from studies.spec import StudySpec
from studies.stats import resolution
from studies.store import (
    REPLICATE,
    TrialRecord,
    get_conclusion,
    open_study,
    records,
    storage_url,
)

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
    train=TrainSettings(steps=4),
    rungs=(2,),
    seed=7,
    objective="nats per row",
)


__all__ = ["no_waiting_for_the_disk"]
pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def open_(tmp_path: Path) -> optuna.Study:
    """The study on disk, as a driver that starts finds it."""
    return open_study(
        "s",
        storage_url(tmp_path, "s", None),
        SPEC,
        sampler=BudgetSampler(SPEC.budget, seed=SPEC.seed),
        pruner=optuna.pruners.NopPruner(),
    )


def fresh_study(
    spec: StudySpec = SPEC, pruner: optuna.pruners.BasePruner | None = None
) -> optuna.Study:
    """A new study in memory, where what a restart finds does not matter."""
    study = optuna.create_study(
        sampler=BudgetSampler(spec.budget, seed=spec.seed),
        pruner=pruner or optuna.pruners.NopPruner(),
    )
    study.set_user_attr(SPEC_ATTR, spec.to_json())
    return study


def drive(
    study: optuna.Study,
    pool: PretendPool,
    rules: Rules,
    spec: StudySpec = SPEC,
    **kwargs: object,
) -> dict[str, object]:
    return Driver(study, spec, lambda: pool, rules, **kwargs).run()  # type: ignore[arg-type]


def own(study: optuna.Study) -> list[TrialRecord]:
    """The finished trials of the search itself."""
    return [r for r in records(study) if r.label != REPLICATE and r.state in ("COMPLETE", "PRUNED")]


RULES = Rules(trials=7, finalists=1, confirm_seeds=2)


def test_the_total_is_exact_and_nothing_runs_twice() -> None:
    study, pool = fresh_study(), PretendPool(size=3)
    drive(study, pool, RULES)
    assert len(own(study)) == RULES.trials
    assert len({(job.allocation, job.seed) for job in pool.jobs}) == len(pool.jobs)
    assert pool.most_running == 3
    assert pool.closed


def test_every_search_contains_its_named_baselines_first() -> None:
    study, pool = fresh_study(), PretendPool(size=1)
    drive(study, pool, RULES)
    baselines = named_allocations(SPEC.budget)
    assert [job.allocation for job in pool.jobs[: len(baselines)]] == list(baselines)
    assert all(job.allocation in SPEC.budget for job in pool.jobs)


def test_the_best_and_the_named_run_again_on_fresh_seeds() -> None:
    study, pool = fresh_study(), PretendPool()
    conclusion = drive(study, pool, RULES)
    best = sorted(own(study), key=lambda r: r.objective or math.inf)[: RULES.finalists]
    expected = {r.allocation for r in best} | set(named_allocations(SPEC.budget))
    replicates = [job for job in pool.jobs if job.seed != SPEC.seed]
    assert Counter(job.seed for job in replicates) == {8: len(expected), 9: len(expected)}
    assert {job.allocation for job in replicates} == expected
    assert conclusion["fresh_seeds"] == [8, 9]
    assert get_conclusion(study) == conclusion


def test_what_the_search_can_tell_is_known_before_the_first_proposal() -> None:
    told: list[Update] = []
    study, pool = fresh_study(), PretendPool(size=1)
    conclusion = drive(study, pool, RULES, notify=told.append)
    baselines = list(named_allocations(SPEC.budget))
    count = len(baselines)
    ran = [(job.allocation, job.seed) for job in pool.jobs[: 3 * count]]
    assert set(ran) == {(a, seed) for a in baselines for seed in (7, 8, 9)}
    (place,) = [i for i, u in enumerate(told) if isinstance(u, Note) and "noise" in u.text]
    before = [u for u in told[:place] if isinstance(u, Ended)]
    assert len(before) == 3 * count
    spread = conclusion["spread"]
    assert isinstance(spread, dict)
    half = resolution(spread["noise"], count + RULES.finalists, 2)
    assert told[place] == Note(
        f"noise of one proxy: {spread['noise']:.4f} nats per row; the named allocations differ by "
        f"{spread['signal']:.4f} beside it"
    )
    assert told[place + 1] == Note(
        f"differences to uniform will be known to about +-{half:.4f} (95%, 2 fresh seeds); more "
        "--confirm-seeds narrow that"
    )


def test_the_noise_is_told_once_and_without_fresh_seeds_not_at_all(tmp_path: Path) -> None:
    def notes(rules: Rules, die_after: float = math.inf) -> list[str]:
        told: list[Update] = []
        with contextlib.suppress(KilledError):
            drive(open_(tmp_path), PretendPool(die_after=die_after), rules, notify=told.append)
        return [u.text for u in told if isinstance(u, Note) and "noise" in u.text]

    assert notes(dataclasses.replace(RULES, confirm_seeds=0)) == []
    assert notes(RULES, die_after=4) == []
    assert len(notes(RULES)) == 1
    assert notes(dataclasses.replace(RULES, trials=9)) == []


def test_fresh_seeds_that_nobody_asks_for_any_more_are_not_run(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        drive(open_(tmp_path), PretendPool(die_after=4), RULES)
    pool = PretendPool()
    drive(open_(tmp_path), pool, dataclasses.replace(RULES, confirm_seeds=0))
    assert {job.seed for job in pool.jobs} == {SPEC.seed}
    gone = [r for r in records(open_(tmp_path)) if r.label == REPLICATE and r.state == "FAIL"]
    assert {r.reason for r in gone} == {"driver stopped", "fewer --confirm-seeds"}


def test_only_complete_named_allocations_run_on_fresh_seeds_at_the_beginning() -> None:
    study, pool = fresh_study(), PretendPool(size=1)
    bad = named("2468", SPEC.budget)

    def fail(job: Job) -> list[Event | Failed]:
        return [Failed("no", retry=False)] if job.allocation == bad else train(job)

    pool.script = fail
    drive(study, pool, RULES)
    assert {job.seed for job in pool.jobs if job.allocation == bad} == {SPEC.seed}


def test_the_confirmation_counts_what_is_left(tmp_path: Path) -> None:
    def phases(trials: int) -> list[Phase]:
        told: list[Update] = []
        rules = dataclasses.replace(RULES, trials=trials, confirm_seeds=3)
        drive(open_(tmp_path), PretendPool(), rules, notify=told.append)
        return [u for u in told if isinstance(u, Phase) and u.name == "confirmation"]

    assert phases(7)[0].total > phases(7)[-1].done > 0
    assert all(phase.done == phase.total for phase in phases(7))


@pytest.mark.parametrize("sampler", ["budget", "tpe", "cmaes"])
def test_proposals_do_not_depend_on_what_confirms_them(sampler: str) -> None:
    def proposals(replicate: float) -> list[Allocation]:
        def script(job: Job) -> list[Event | Failed]:
            return train(job) if job.seed == SPEC.seed else [finished(replicate * objective(job))]

        pool = PretendPool(size=1, script=script)
        study = fresh_study()
        study.sampler = make_sampler(sampler, SPEC.budget, SPEC.seed)
        drive(study, pool, dataclasses.replace(RULES, trials=20, confirm_seeds=2))
        return [job.allocation for job in pool.jobs if job.seed == SPEC.seed]

    assert proposals(1.0) == proposals(-5.0)


def test_only_the_search_is_evaluated_on_the_way() -> None:
    pool = PretendPool()
    drive(fresh_study(), pool, RULES)
    assert {job.rungs for job in pool.jobs if job.seed == SPEC.seed} == {SPEC.rungs}
    assert {job.rungs for job in pool.jobs if job.seed != SPEC.seed} == {()}


def test_a_finished_study_starts_no_worker(tmp_path: Path) -> None:
    drive(open_(tmp_path), PretendPool(), RULES)

    def no_pool() -> PretendPool:
        raise AssertionError("a worker was started for nothing")

    driver = Driver(open_(tmp_path), SPEC, no_pool, RULES)
    driver.run()
    assert driver.trials.started == 0


def test_more_trials_go_on_with_a_finished_study(tmp_path: Path) -> None:
    drive(open_(tmp_path), PretendPool(), RULES)
    study, pool = open_(tmp_path), PretendPool()
    drive(study, pool, dataclasses.replace(RULES, trials=9))
    assert len(own(study)) == 9
    assert sum(job.seed == SPEC.seed for job in pool.jobs) == 2
    done = Counter((r.allocation, r.seed) for r in records(study) if r.state == "COMPLETE")
    assert set(done.values()) == {1}


@pytest.mark.parametrize("killed_at", (0, 4, 9, 13))
def test_a_killed_driver_loses_and_repeats_nothing(tmp_path: Path, killed_at: int) -> None:
    with pytest.raises(KilledError):
        drive(open_(tmp_path), PretendPool(die_after=killed_at), RULES)
    before = [r for r in records(open_(tmp_path)) if r.state == "COMPLETE"]
    study = open_(tmp_path)
    drive(study, PretendPool(), RULES)
    after = {r.number: r for r in records(study)}
    assert [after[r.number] for r in before] == before
    assert len(own(study)) == RULES.trials
    complete = Counter((r.allocation, r.seed) for r in after.values() if r.state == "COMPLETE")
    assert set(complete.values()) == {1}
    assert not [r for r in after.values() if r.state in ("RUNNING", "WAITING")]
    assert {r.reason for r in after.values() if r.state == "FAIL"} <= {"driver stopped"}


def test_a_driver_killed_again_and_again_still_gets_there(tmp_path: Path) -> None:
    for _ in range(20):
        with contextlib.suppress(KilledError):
            drive(open_(tmp_path), PretendPool(die_after=1), RULES)
            break
    study = open_(tmp_path)
    assert len(own(study)) == RULES.trials
    named_runs = Counter(
        r.label for r in records(study) if r.state == "COMPLETE" and r.label.startswith("named")
    )
    assert set(named_runs.values()) == {1}
    assert len(named_runs) == len(named_allocations(SPEC.budget))


def test_a_stop_request_leaves_a_store_that_goes_on(tmp_path: Path) -> None:
    study, pool = open_(tmp_path), PretendPool()
    stop = iter([False] * 12 + [True])
    with pytest.raises(StopRequestedError):
        drive(study, pool, RULES, stop_requested=lambda: next(stop))
    assert pool.closed
    states = Counter(r.state for r in records(study))
    assert states["RUNNING"] == 0
    assert states["WAITING"] >= states["FAIL"] > 0
    drive(open_(tmp_path), PretendPool(), RULES)
    assert len(own(study)) == RULES.trials


def test_a_failed_trial_runs_again_once() -> None:
    unlucky = named("2468", SPEC.budget)
    calls = Counter[Allocation]()

    def script(job: Job) -> list[Event | Failed]:
        calls[job.allocation] += 1
        if job.allocation == unlucky and calls[unlucky] == 1:
            return [Step(1, 2.0), Failed("the worker died")]
        return train(job)

    study = fresh_study()
    drive(study, PretendPool(script=script), Rules(trials=6, confirm_seeds=0))
    first, second = (r for r in records(study) if r.allocation == unlucky)
    assert (first.state, first.reason) == ("FAIL", "the worker died")
    assert (second.state, second.label, second.retry_of) == ("COMPLETE", first.label, first.number)
    assert len(own(study)) == 6


def test_an_allocation_that_always_fails_is_replaced_by_another() -> None:
    unlucky = named("8228", SPEC.budget)

    def script(job: Job) -> list[Event | Failed]:
        return [Failed("out of memory")] if job.allocation == unlucky else train(job)

    study, pool = fresh_study(), PretendPool(script=script)
    drive(study, pool, Rules(trials=6, confirm_seeds=0))
    assert sum(job.allocation == unlucky for job in pool.jobs) == 2
    assert len(own(study)) == 6


@pytest.mark.parametrize(
    "event",
    [Step(1, math.nan), Rung(2, math.inf, 0.5), finished(math.nan)],
    ids=["loss", "rung", "result"],
)
def test_a_number_that_is_not_finite_fails_the_trial_without_a_retry(
    event: Event,
) -> None:
    unlucky = named("8642", SPEC.budget)

    def script(job: Job) -> list[Event | Failed]:
        return [event, *train(job)] if job.allocation == unlucky else train(job)

    study, pool = fresh_study(), PretendPool(script=script)
    drive(study, pool, Rules(trials=6, confirm_seeds=0))
    (record,) = (r for r in records(study) if r.allocation == unlucky)
    assert record.state == "FAIL"
    assert "not a finite number" in record.reason
    assert len(own(study)) == 6


def test_failures_in_a_row_stop_the_search_and_leave_it_resumable(tmp_path: Path) -> None:
    def broken(job: Job) -> list[Event | Failed]:
        return [Failed("no GPU")]

    study, pool = open_(tmp_path), PretendPool(script=broken)
    with pytest.raises(TooManyFailuresError, match=r"3 trials failed in a row.*no GPU"):
        drive(study, pool, dataclasses.replace(RULES, max_failures=3))
    assert len(pool.jobs) <= 4
    assert pool.closed
    study = open_(tmp_path)
    drive(study, PretendPool(), RULES)
    assert len(own(study)) == RULES.trials


def test_failures_that_do_not_follow_each_other_stop_nothing() -> None:
    tries = Counter[tuple[Allocation, int]]()

    def script(job: Job) -> list[Event | Failed]:
        tries[job.allocation, job.seed] += 1
        first_time = tries[job.allocation, job.seed] == 1
        return [Failed("hiccup")] if first_time and job.number % 3 < 2 else train(job)

    study = fresh_study()
    drive(study, PretendPool(size=1, script=script), dataclasses.replace(RULES, max_failures=3))
    assert len(own(study)) == RULES.trials
    assert sum(r.state == "FAIL" for r in records(study)) > 3


def test_pruned_trials_count_and_never_win() -> None:
    class PruneSearch(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            return True

    def script(job: Job) -> list[Event | Failed]:
        return [Rung(2, -100.0, 0.5), finished(objective(job))]

    study, pool = fresh_study(pruner=PruneSearch()), PretendPool(script=script)
    conclusion = drive(study, pool, RULES)
    by_state = {r.number: r.state for r in records(study)}
    pruned = [r for r in own(study) if r.state == "PRUNED"]
    assert len(own(study)) == RULES.trials
    assert len(pruned) == RULES.trials - len(named_allocations(SPEC.budget))
    assert {r.label for r in pruned} == {"search"}, "baselines and replicates run to their end"
    assert by_state[conclusion["winner"]] == "COMPLETE"  # type: ignore[index]
    assert pruned[0].rungs == {2: -100.0}


def test_late_and_repeated_events_are_ignored() -> None:
    class Stutter(PretendPool):
        def poll(self, timeout_seconds: float) -> list[tuple[int, Event | Failed]]:
            return [e for event in super().poll(timeout_seconds) for e in (event, event)]

    study = fresh_study()
    drive(study, Stutter(), RULES)
    assert len(own(study)) == RULES.trials
    assert {r.state for r in records(study)} == {"COMPLETE"}


def test_a_budget_smaller_than_the_trials_is_searched_whole() -> None:
    spec = dataclasses.replace(SPEC, total=5, high=2)
    assert spec.budget.size() == 4
    study = fresh_study(spec)
    driver = Driver(study, spec, PretendPool, Rules(trials=50, confirm_seeds=2))
    driver.run()
    assert driver.goal == 4
    assert {r.allocation for r in own(study)} == {spec.budget.member(i) for i in range(4)}


def test_few_trials_leave_named_allocations_out_and_say_so() -> None:
    seen: list[Update] = []
    study, pool = fresh_study(), PretendPool()
    drive(study, pool, Rules(trials=2, confirm_seeds=0), notify=seen.append)
    assert [job.allocation for job in pool.jobs] == list(named_allocations(SPEC.budget))[:2]
    assert any(
        "leaves no room for the allocation 2882" in getattr(update, "text", "") for update in seen
    )


def test_an_allocation_from_outside_the_budget_is_refused() -> None:
    study = fresh_study()
    study.enqueue_trial({f"experts_0{i}": 1 for i in range(4)})
    drive(study, PretendPool(), RULES)
    outside = records(study)[0]
    assert (outside.state, outside.reason) == ("FAIL", "1x4 is not in the budget")
    assert len(own(study)) == RULES.trials


def test_an_allocation_enqueued_in_part_is_completed_or_refused() -> None:
    study = fresh_study()
    study.enqueue_trial({"experts_02": 6, "experts_03": 6})
    study.enqueue_trial({"experts_02": 6})
    told: list[Update] = []
    drive(study, PretendPool(), RULES, notify=told.append)
    refused, completed = study.get_trials()[:2]
    assert refused.state.name == "FAIL"
    assert "out of reach" in refused.user_attrs["reason"]
    assert Note(refused.user_attrs["reason"]) in told
    assert completed.state.name == "COMPLETE"
    assert completed.params["experts_02"] == 6
    assert all(r.allocation in SPEC.budget for r in own(study))
    assert len(own(study)) == RULES.trials


def test_the_listeners_hear_of_every_trial() -> None:
    seen: list[Update] = []
    study, pool = fresh_study(), PretendPool()
    drive(study, pool, RULES, notify=seen.append)
    phases = [update for update in seen if isinstance(update, Phase)]
    assert [(phase.name, phase.workers) for phase in phases] == [("search", 2), ("confirmation", 2)]
    assert (phases[0].done, phases[0].total) == (0, RULES.trials)
    ended = [update for update in seen if isinstance(update, Ended)]
    assert sorted(e.job.number for e in ended) == [r.number for r in records(study)]
    assert all(0 <= e.seconds < 60 for e in ended)
    rungs = [u.number for u in seen if isinstance(u, Progress) and isinstance(u.event, Rung)]
    assert sorted(rungs) == [r.number for r in records(study) if r.rungs]
    started = [update for update in seen if isinstance(update, Started)]
    assert [s.job for s in started] == pool.jobs
    assert {(s.job.number, s.label) for s in started} == {
        (r.number, r.label) for r in records(study)
    }


def test_the_listeners_hear_of_failures_and_of_what_was_interrupted() -> None:
    def script(job: Job) -> list[Event | Failed]:
        return [Failed("out of luck")] if job.number == 3 else train(job)

    seen: list[Update] = []
    study = fresh_study()
    with pytest.raises(StopRequestedError):
        drive(
            study,
            PretendPool(script=script),
            RULES,
            notify=seen.append,
            stop_requested=lambda: len(seen) > 30,
        )
    failed = {r.number: r.reason for r in records(study) if r.state == "FAIL"}
    told = {u.job.number: u.reason for u in seen if isinstance(u, Ended) and u.state == "FAIL"}
    assert told == failed
    assert failed[3] == "out of luck"
    assert "stopped by the user" in failed.values()


def test_each_trial_has_its_label_and_seed_written_down() -> None:
    study = fresh_study()
    drive(study, PretendPool(), RULES)
    attrs = [(t.user_attrs[LABEL_ATTR], t.user_attrs[SEED_ATTR]) for t in study.get_trials()]
    assert attrs == [(r.label, r.seed) for r in records(study)]


def test_the_workers_come_up_before_the_first_trial_is_asked_for() -> None:
    study, pool = fresh_study(), PretendPool(ready_after=5)
    drive(study, pool, RULES)
    assert pool.jobs[0].number == 0


def test_proposals_depend_on_the_results_so_far() -> None:
    """Not all at once up front: a proposal is asked for when a worker is free."""
    study = fresh_study()
    asked_at: list[int] = []

    class Watch(PretendPool):
        def start(self, job: Job) -> None:
            asked_at.append(len(own(study)))
            super().start(job)

    drive(study, Watch(size=2), RULES)
    assert all(done >= started - 2 for started, done in enumerate(asked_at[: RULES.trials], 1))


def test_the_budget_of_the_pretence_has_room() -> None:
    assert ExpertBudget(4, 12, 1, 6).size() > 50


def test_a_workers_memory_is_told_and_changes_nothing() -> None:
    told: list[Update] = []
    memory = Memory(1, 2)
    study = fresh_study()
    pool = PretendPool(script=lambda job: [memory, *train(job)])  # type: ignore[list-item]
    drive(study, pool, RULES, notify=told.append)
    assert Progress(0, memory) in told
    assert all(record.state == "COMPLETE" for record in records(study))


def test_it_stops_early_once_nothing_is_left_to_gain_and_stays_so() -> None:
    spec = dataclasses.replace(SPEC, total=20, high=9)
    rules = Rules(trials=60, finalists=1, confirm_seeds=2, stop_early=True)
    study, notes = fresh_study(spec), []
    driver = Driver(study, spec, PretendPool, rules, notify=notes.append)
    driver.run()
    measured = len(own(study))
    assert driver.settled
    assert LEAST <= measured < rules.trials
    said = [update.text for update in notes if isinstance(update, Note)]
    assert sum(text.startswith("stops after") for text in said) == 1
    assert get_conclusion(study) is not None

    again = Driver(study, spec, PretendPool, rules)
    again.run()
    assert again.settled
    assert len(own(study)) == measured


def test_a_finished_search_stays_finished_whatever_the_replicates_said() -> None:
    """Who is confirmed follows from the search alone, even where all is noise."""
    spec = dataclasses.replace(SPEC, total=20, high=9)
    rules = Rules(trials=24, finalists=3, confirm_seeds=3)

    def noise(job: Job) -> list[Event | Failed]:
        return [finished(hash((job.allocation.experts, 31 * job.seed)) % 1000 / 1e3)]

    study, pool = fresh_study(spec), PretendPool(script=noise)
    first = drive(study, pool, rules, spec)
    again = PretendPool(script=noise)
    assert drive(study, again, rules, spec) == first
    assert again.jobs == []
