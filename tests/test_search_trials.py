"""Another program writes to the study of a running search, through a connection of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from pretend_pool import PretendPool, finished, no_waiting_for_the_disk, train
from test_search_driver import RULES, SPEC, drive, open_, own

from mola.events import Event, Finished, Rung
from search.trials import StopRequestedError, TooManyFailuresError
from search.updates import Ended, Started, Update
from search.workers.pool import Failed, Job
from studies.records import ForeignDataError, records
from studies.store import reconcile, storage_url

__all__ = ["no_waiting_for_the_disk"]
pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


class Watched(PretendPool):
    """A pool that calls something once, with what a poll has just brought."""

    def __init__(self, look: Callable[[list[tuple[int, Event | Failed]]], bool]) -> None:
        super().__init__()
        self._look = look
        self._called = False

    def poll(self, timeout_seconds: float) -> list[tuple[int, Event | Failed]]:
        events = super().poll(timeout_seconds)
        self._called = self._called or self._look(events)
        return events


def elsewhere(tmp_path: Path) -> optuna.Study:
    """The same study in another program."""
    return optuna.load_study(study_name="s", storage=storage_url(tmp_path, "s", None))


@pytest.mark.parametrize("at", [Rung, Finished])
def test_a_trial_that_another_program_ends_is_let_go(tmp_path: Path, at: type) -> None:
    study, ended, told = open_(tmp_path), [], list[Update]()

    def end(events: list[tuple[int, Event | Failed]]) -> bool:
        for number, event in events:
            if number >= 4 and isinstance(event, at):
                elsewhere(tmp_path).tell(number, state=TrialState.FAIL)
                ended.append(number)
                return True
        return False

    pool = Watched(end)
    drive(study, pool, RULES, notify=told.append)
    (number,) = ended
    assert len(own(study)) == RULES.trials
    assert [r.state for r in records(study) if r.number == number] == ["FAIL"]
    assert not pool.running
    reasons = [update.reason for update in told if isinstance(update, Ended) and update.reason]
    assert reasons == ["another program ended it"]
    assert reconcile(study) == 0


def test_what_ends_while_its_own_end_is_being_written_keeps_the_first_state(tmp_path: Path) -> None:
    study, ended, told = open_(tmp_path), list[int](), list[Update]()
    write = study._storage._writes.__class__.write

    def late(writes: object, connection: object) -> list[int]:
        if writes.ended and not ended:  # type: ignore[attr-defined]
            ended.append(next(iter(writes.ended)))  # type: ignore[attr-defined]
            connection.exec_driver_sql("UPDATE trials SET state='FAIL' WHERE trial_id=?", (*ended,))  # type: ignore[attr-defined]
        return write(writes, connection)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study._storage._writes.__class__, "write", late)
        drive(study, PretendPool(), RULES, notify=told.append)
    assert ended
    assert len(own(study)) == RULES.trials
    assert [t.state for t in study.get_trials() if t._trial_id in ended] == [TrialState.FAIL]
    assert not study.get_trials(states=(TrialState.RUNNING,))
    (number,) = [t.number for t in study.get_trials() if t._trial_id in ended]
    (end,) = [u for u in told if isinstance(u, Ended) and u.job.number == number]
    assert (end.state, end.reason) == ("FAIL", "another program ended it")


def test_a_trial_that_fails_here_and_was_ended_elsewhere_is_let_go(tmp_path: Path) -> None:
    study, told = open_(tmp_path), list[Update]()

    def end(events: list[tuple[int, Event | Failed]]) -> bool:
        for number, event in events:
            if isinstance(event, Failed):
                elsewhere(tmp_path).tell(number, state=TrialState.FAIL)
                return True
        return False

    pool = Watched(end)
    pool.script = lambda job: [Failed("bad luck")] if job.number == 2 else train(job)
    drive(study, pool, RULES, notify=told.append)
    assert len(own(study)) == RULES.trials
    (ended,) = [u for u in told if isinstance(u, Ended) and u.job.number == 2]
    assert (ended.state, ended.reason) == ("FAIL", "another program ended it")
    assert not [r for r in records(study) if r.retry_of == 2]  # it did not fail here


def test_a_stop_ends_all_trials_though_one_was_ended_elsewhere(tmp_path: Path) -> None:
    study, told = open_(tmp_path), list[Update]()
    stop: list[int] = []

    def end(events: list[tuple[int, Event | Failed]]) -> bool:
        for number, event in events:
            if isinstance(event, Rung):
                elsewhere(tmp_path).tell(number, state=TrialState.FAIL)
                stop.append(number)
                return True
        return False

    pool = Watched(end)
    pool.size = 4
    with pytest.raises(StopRequestedError):
        drive(study, pool, RULES, notify=told.append, stop_requested=lambda: bool(stop))
    assert not study.get_trials(states=(TrialState.RUNNING,))
    started = {u.job.number for u in told if isinstance(u, Started)}
    assert {u.job.number for u in told if isinstance(u, Ended)} == started


def test_results_of_the_poll_in_which_the_search_gives_up_are_kept(tmp_path: Path) -> None:
    study = open_(tmp_path)

    def script(job: Job) -> list[Event | Failed]:
        return [Failed("no GPU")] if job.number == 0 else [finished(1.0)]

    with pytest.raises(TooManyFailuresError, match="1 trials failed"):
        drive(study, PretendPool(size=2, script=script), replace(RULES, max_failures=1))
    assert [r.number for r in records(study) if r.state == "COMPLETE"] == [1]


def test_a_write_that_cannot_be_understood_ends_the_search_with_one_line(tmp_path: Path) -> None:
    study = open_(tmp_path)

    def complete(events: list[tuple[int, Event | Failed]]) -> bool:
        for number, event in events:
            if isinstance(event, Rung):
                elsewhere(tmp_path).tell(number, 0.5)  # and no accuracy
                return True
        return False

    with pytest.raises(ForeignDataError, match="trial 0 was completed by another program"):
        drive(study, Watched(complete), RULES)
    assert SPEC.num_layers == len(study.get_trials()[0].params)


def test_what_listeners_are_told_is_in_the_store(tmp_path: Path) -> None:
    study, told = open_(tmp_path), []

    def look(update: Update) -> None:
        if isinstance(update, Ended):
            (trial,) = [t for t in elsewhere(tmp_path).trials if t.number == update.job.number]
            told.append((trial.state.name, trial.value) == (update.state, update.objective))

    drive(study, PretendPool(), RULES, notify=look)
    assert len(told) == len(records(study))
    assert all(told)
