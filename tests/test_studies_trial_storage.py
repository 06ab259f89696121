"""The storage that keeps trials in memory says what Optuna's own says of the same database."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, TrialState
from pretend_pool import no_waiting_for_the_disk
from pretend_study import SEARCHED, empty_study, run_one, searched_study
from sqlalchemy import event

from mola.allocation import Allocation
from mola.events import Finished
from studies import store
from studies.storage import connect
from studies.trial_rows import PARAMS_ATTR, LazyJson
from studies.trial_storage import EndedElsewhereError, TrialStorage

__all__ = ["no_waiting_for_the_disk"]
pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")
RANGE = IntDistribution(1, 6)


def url_of(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'study.db'}"


def open_(tmp_path: Path) -> optuna.Study:
    """A study as a process that starts finds it."""
    storage = TrialStorage(connect(url_of(tmp_path), create=True))
    return optuna.create_study(study_name="mine", storage=storage, load_if_exists=True)


def by_optuna(tmp_path: Path) -> list[FrozenTrial]:
    """What Optuna's own storage reads, without our attribute."""
    trials = optuna.load_study(study_name="mine", storage=url_of(tmp_path)).get_trials()
    for trial in trials:
        trial.system_attrs = {k: v for k, v in trial.system_attrs.items() if k != PARAMS_ATTR}
    return trials


def without_ours(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    for trial in trials:
        trial.system_attrs = {k: v for k, v in trial.system_attrs.items() if k != PARAMS_ATTR}
        trial.distributions = dict(trial.distributions)
    return trials


def run(study: optuna.Study, experts: tuple[int, ...], value: float) -> None:
    study.enqueue_trial({f"experts_{layer:02d}": count for layer, count in enumerate(experts)})
    trial = study.ask()
    with store.at_once(study):
        for layer in range(len(experts)):
            trial.suggest_int(f"experts_{layer:02d}", 1, 6)
        trial.set_user_attr("seed", 3)
        trial.report(value + 1, 5)
        study.tell(trial, value)


def test_a_searched_study_reads_as_by_optuna_in_memory_and_again_from_the_file(
    tmp_path: Path,
) -> None:
    storage = TrialStorage(connect(url_of(tmp_path), create=True))
    study = searched_study("mine", storage)  # type: ignore[arg-type]
    expected = by_optuna(tmp_path)
    assert {t.state for t in expected} >= {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}
    assert without_ours(study.get_trials()) == expected
    assert without_ours(open_(tmp_path).get_trials()) == expected


def test_a_study_of_an_older_version_reads_as_by_optuna(tmp_path: Path) -> None:
    searched_study("mine", url_of(tmp_path))
    trials = open_(tmp_path).get_trials()
    assert not any(PARAMS_ATTR in trial.system_attrs for trial in trials)
    assert trials == by_optuna(tmp_path)
    assert SEARCHED[0] in {r.allocation for r in store.records(open_(tmp_path))}


def test_parameters_are_rows_for_others_and_one_attribute_for_us(tmp_path: Path) -> None:
    study = open_(tmp_path)
    run(study, (1, 2, 3), 0.5)
    (ours,), (theirs,) = open_(tmp_path).get_trials(), by_optuna(tmp_path)
    assert theirs.params == {"experts_00": 1, "experts_01": 2, "experts_02": 3}
    assert theirs.distributions == dict.fromkeys(theirs.params, RANGE)
    assert ours.system_attrs[PARAMS_ATTR] == {
        "experts": [1, 2, 3],
        "low": [1] * 3,
        "high": [6] * 3,
    }


def test_parameters_that_are_no_allocation_are_kept_as_they_are(tmp_path: Path) -> None:
    study = open_(tmp_path)
    trial = study.ask()
    trial.suggest_float("x", 0, 1)
    trial.suggest_categorical("y", ["a", "b"])
    study.tell(trial, float("inf"))
    assert open_(tmp_path).get_trials() == by_optuna(tmp_path)


def test_what_belongs_together_is_one_transaction(tmp_path: Path) -> None:
    study = open_(tmp_path)
    commits: list[None] = []
    storage = study._storage
    assert isinstance(storage, TrialStorage)
    trial = study.ask()
    event.listen(storage._backend.engine, "commit", lambda connection: commits.append(None))
    with store.at_once(study):
        for key in range(20):
            trial.set_user_attr(f"key {key}", key)
        study.tell(trial, 1.0)
        assert by_optuna(tmp_path)[0].user_attrs == {}
        assert study.trials[0].user_attrs["key 19"] == 19
        assert not commits
    assert len(commits) == 1
    assert by_optuna(tmp_path)[0].user_attrs == {f"key {key}": key for key in range(20)}
    assert by_optuna(tmp_path)[0].value == 1.0


def test_an_attribute_that_is_written_twice_keeps_the_later_value(tmp_path: Path) -> None:
    study = open_(tmp_path)
    trial = study.ask()
    for value in (1, 2):
        trial.set_user_attr("key", value)
        study._storage.set_trial_system_attr(trial._trial_id, "key", value)
        study._storage.set_study_system_attr(study._study_id, "key", value)
    assert by_optuna(tmp_path)[0].user_attrs == {"key": 2}
    assert by_optuna(tmp_path)[0].system_attrs == {"key": 2}
    assert study._storage.get_study_system_attrs(study._study_id) == {"key": 2}


def test_trials_of_other_processes_appear_and_end(tmp_path: Path) -> None:
    study, other = open_(tmp_path), open_(tmp_path)
    first = study.ask()
    assert [t.state for t in other.trials] == [TrialState.RUNNING]
    first.set_user_attr("key", 1)
    assert other.trials[0].user_attrs == {"key": 1}
    other.enqueue_trial({"experts_00": 4})
    assert [t.state for t in study.trials] == [TrialState.RUNNING, TrialState.WAITING]
    study.tell(first, 0.5)
    assert other.trials[0].state == TrialState.COMPLETE
    assert study.ask().number == 1
    assert [t.number for t in other.trials] == [0, 1]


def test_a_trial_that_somebody_else_has_ended_is_not_overwritten(tmp_path: Path) -> None:
    study, other = open_(tmp_path), open_(tmp_path)
    trial = study.ask()
    other.tell(trial.number, state=TrialState.FAIL)
    with pytest.raises(EndedElsewhereError, match="somebody else"):
        study.tell(trial, 1.0)
    assert by_optuna(tmp_path)[0].state == TrialState.FAIL
    assert study.trials[0].state == TrialState.FAIL


def test_a_transaction_that_fails_leaves_memory_as_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_(tmp_path)
    trial = study.ask()
    storage = study._storage
    assert isinstance(storage, TrialStorage)

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    event.listen(storage._backend.engine, "begin", fail)
    with pytest.raises(OSError, match="full"):
        study.tell(trial, 1.0)
    event.remove(storage._backend.engine, "begin", fail)
    assert study.trials[0].state == TrialState.RUNNING
    study.tell(trial, 1.0)
    assert study.trials[0].value == 1.0


def test_what_a_reader_got_never_changes(tmp_path: Path) -> None:
    study = open_(tmp_path)
    trial = study.ask()
    (before,) = study.get_trials(deepcopy=False)
    trial.set_user_attr("key", 1)
    study.tell(trial, 1.0)
    (after,) = study.get_trials(deepcopy=False)
    assert (before.state, before.user_attrs) == (TrialState.RUNNING, {})
    assert (after.state, after.user_attrs) == (TrialState.COMPLETE, {"key": 1})
    assert study.get_trials(deepcopy=False)[0] is after


def test_a_large_attribute_is_decoded_when_somebody_looks(tmp_path: Path) -> None:
    large = {"load": [[0.25] * 10] * 50, "entropy": [0.5] * 50}
    study = open_(tmp_path)
    trial = study.ask()
    trial.set_user_attr("routing", large)
    study.tell(trial, 1.0)
    for found in (study, open_(tmp_path)):
        routing = found.trials[0].user_attrs["routing"]
        assert isinstance(routing, LazyJson)
        assert dict(routing) == large
        assert routing["entropy"] == large["entropy"]
        assert len(routing) == 2


def test_a_record_holds_the_routing_of_a_deep_model(tmp_path: Path) -> None:
    large = {"load": [[0.25] * 10] * 50, "entropy": [0.5] * 50}
    study = empty_study("mine", TrialStorage(connect(url_of(tmp_path), create=True)))  # type: ignore[arg-type]
    trial = run_one(study, SEARCHED[0], end="leave")
    store.complete(study, trial, Finished(10, 1.0, 0.75, 0.01, 3.0, 1.0, large))
    (record,) = store.records(study)
    assert dict(record.routing) == large


def test_records_are_made_once_per_trial(tmp_path: Path) -> None:
    study = searched_study("mine", TrialStorage(connect(url_of(tmp_path), create=True)))  # type: ignore[arg-type]
    before = store.records(study)
    store.enqueue(study, Allocation([3] * 6), label="search", seed=9)
    after = store.records(study)
    assert all(a is b for a, b in zip(before, after, strict=False))
    assert len(after) == len(before) + 1
