"""Write to a study what trials are asked for and what becomes of them.

Attributes are written before the state of a trial: a driver that is killed in between leaves a
trial that runs again, never a finished one that lacks its seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from optuna_dashboard._note import note_ver_key, split_body

from mola.allocation import Allocation
from mola.events import Finished
from studies.encoding import from_params, to_params
from studies.note import trial_note
from studies.records import (
    BLAMELESS_ATTR,
    LABEL_ATTR,
    REASON_ATTR,
    RESULT_ATTRS,
    RETRY_ATTR,
    SAVE_MEMORY_ATTR,
    SEARCH,
    SEED_ATTR,
    TrialRecord,
    records,
)
from studies.trial_storage import TrialStorage

DRIVER_STOPPED = "driver stopped"
_MAX_REASON = 2000  # characters


def enqueue(study: optuna.Study, allocation: Allocation, *, label: str, seed: int) -> bool:
    """Ask for an allocation to be run, unless it is waiting, running or done on that seed.

    Returns:
        Whether it was enqueued.
    """
    alive = ("WAITING", "RUNNING", "COMPLETE", "PRUNED")
    for record in records(study):
        if (record.allocation, record.seed) == (allocation, seed) and record.state in alive:
            return False
    _enqueue(study, allocation, {LABEL_ATTR: label, SEED_ATTR: seed})
    return True


@contextmanager
def at_once(study: optuna.Study) -> Iterator[None]:
    """Write what is written to a study within in one transaction, where the storage can."""
    storage = study._storage
    with storage.at_once() if isinstance(storage, TrialStorage) else nullcontext():
        yield


def mark(trial: optuna.Trial, *, label: str, seed: int) -> None:
    """Record why a fresh trial runs and on which seed; an enqueued one knows both already."""
    for key, value in ((LABEL_ATTR, label), (SEED_ATTR, seed)):
        if trial.user_attrs.get(key) != value:
            trial.set_user_attr(key, value)


def complete(study: optuna.Study, trial: optuna.Trial, event: Finished) -> None:
    """Record a trial's result and end it.

    Raises:
        ValueError: The objective or the accuracy is not finite; such a trial is to `fail`.
    """
    if not (math.isfinite(event.objective) and math.isfinite(event.accuracy)):
        raise ValueError(
            f"trial {trial.number} cannot be complete with objective {event.objective} and "
            f"accuracy {event.accuracy}; fail it"
        )
    with at_once(study):
        _check_open(study, trial.number)
        for key in RESULT_ATTRS:
            trial.set_user_attr(key, getattr(event, key))
        study.tell(trial, event.objective)
        _note(
            trial,
            from_params(trial.params),
            f"{event.objective:.4f}, standard error {event.standard_error:.4f} over the rows, "
            f"accuracy {event.accuracy:.1%}, {event.train_seconds:.0f} s of training and "
            f"{event.eval_seconds:.0f} s of evaluation",
        )


def prune(study: optuna.Study, trial: optuna.Trial) -> None:
    """End a trial that is not worth its further steps; its value is that of its last rung."""
    with at_once(study):
        _check_open(study, trial.number)
        study.tell(trial, state=TrialState.PRUNED)
        _note(trial, from_params(trial.params), "pruned: worse than the others at a rung")


def fail(
    study: optuna.Study,
    trial: optuna.Trial,
    reason: str,
    *,
    retry: bool,
    save_memory: bool = False,
) -> None:
    """End a trial that broke.

    Args:
        study: The study.
        trial: The trial.
        reason: What happened.
        retry: Whether its allocation runs again on its seed, if it broke for the first time.
        save_memory: Whether it is then to take less memory.
    """
    history = records(study)
    this = next((r for r in history if r.number == trial.number), None)
    again = retry and this is not None and not _broke_before(study, history, this)
    attrs: dict[str, Any] = {REASON_ATTR: reason}
    also = {SAVE_MEMORY_ATTR: True} if save_memory else {}
    _end_failed(study, trial.number, this if again else None, history, attrs, also)
    if this is not None:
        _note(trial, this.allocation, f"failed: {reason[:_MAX_REASON]}")


def interrupt(study: optuna.Study, trial: optuna.Trial, reason: str) -> None:
    """End a trial through no fault of its own; its allocation is enqueued again."""
    history = records(study)
    this = next((r for r in history if r.number == trial.number), None)
    _end_failed(study, trial.number, this, history, {REASON_ATTR: reason, BLAMELESS_ATTR: True})


def withdraw(study: optuna.Study, number: int, reason: str) -> None:
    """End a waiting trial that is not wanted any more."""
    trial = next(t for t in study.get_trials(deepcopy=False) if t.number == number)
    if study._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
        _end_failed(study, number, None, [], {REASON_ATTR: reason, BLAMELESS_ATTR: True})


def reconcile(study: optuna.Study) -> int:
    """Fail what a killed driver left running, and enqueue each such allocation again, once.

    Call it before the first ask, while no other driver works on the study.

    Returns:
        Number of trials that were left running.
    """
    running = [t.number for t in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]
    for number in running:
        history = records(study)
        this = next((r for r in history if r.number == number), None)
        attrs = {REASON_ATTR: DRIVER_STOPPED, BLAMELESS_ATTR: True}
        _end_failed(study, number, this, history, attrs)
    return len(running)


def _note(trial: optuna.Trial, allocation: Allocation, result: str) -> None:
    """Write a trial's note for the dashboard; nothing else reads it.

    The dashboard's own function reads the notes of all trials to write one.
    """
    attrs = trial.study._storage.get_trial(trial._trial_id).user_attrs  # `trial` would copy them
    label, seed = attrs.get(LABEL_ATTR, SEARCH), attrs.get(SEED_ATTR, "that of the study")
    note = split_body(trial_note(allocation, label, seed, result), trial._trial_id)
    for key, text in {note_ver_key(trial._trial_id): 1, **note}.items():
        trial.study._storage.set_study_system_attr(trial.study._study_id, key, text)


def _enqueue(study: optuna.Study, allocation: Allocation, attrs: dict[str, Any]) -> None:
    study.enqueue_trial(to_params(allocation), user_attrs=attrs)


def _broke_before(study: optuna.Study, history: list[TrialRecord], this: TrialRecord) -> bool:
    """Whether an earlier trial of the same allocation and seed failed through its own fault."""
    blameless = {
        t.number
        for t in study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        if t.user_attrs.get(BLAMELESS_ATTR)
    }
    return any(
        r.state == "FAIL" and r.number not in blameless
        for r in history
        if (r.allocation, r.seed) == (this.allocation, this.seed)
    )


def _end_failed(
    study: optuna.Study,
    number: int,
    again: TrialRecord | None,
    history: list[TrialRecord],
    attrs: dict[str, Any],
    also: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Enqueue a trial's allocation again (None: do not), then fail the trial.

    The successor keeps what the trial was told of memory, and gets the attributes of `also`.

    In this order, a driver that is killed in between leaves a running trial and its successor;
    `reconcile` then finds the successor and adds no second one.
    """
    with at_once(study):
        trial = _check_open(study, number)
        if again is not None and not any(
            r.state in ("WAITING", "COMPLETE", "PRUNED")
            for r in history
            if (r.allocation, r.seed) == (again.allocation, again.seed)
        ):
            kept = {k: v for k, v in trial.user_attrs.items() if k == SAVE_MEMORY_ATTR}
            successor = {LABEL_ATTR: again.label, SEED_ATTR: again.seed, RETRY_ATTR: number}
            _enqueue(study, again.allocation, {**kept, **successor, **also})
        for key, value in attrs.items():
            text = value[:_MAX_REASON] if isinstance(value, str) else value
            # The only way to write to a trial that another process asked for.
            study._storage.set_trial_user_attr(trial._trial_id, key, text)
        _check_open(study, number)
        study.tell(number, state=TrialState.FAIL)


def _check_open(study: optuna.Study, number: int) -> FrozenTrial:
    """Give a running trial.

    Raises:
        UpdateFinishedTrialError: Another program has ended it.
    """
    (trial,) = (t for t in study.get_trials(deepcopy=False) if t.number == number)
    if trial.state.is_finished():
        raise UpdateFinishedTrialError(f"another program has ended trial {number}")
    return trial
