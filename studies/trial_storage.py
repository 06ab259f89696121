"""Keep a study's trials in memory beside Optuna's database, so that thousands of them stay quick.

Optuna reads a running trial anew, with a row per layer, each time that anybody asks for the trials,
and writes each parameter in a transaction of its own. Here what this process writes is known
without reading it back, and what belongs together is written at once. The database keeps Optuna's
tables and contents; the dashboard and other programs see no difference.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection, Select, select

from studies.patient import PatientStorage, StoreError
from studies.trial_rows import TRIALS, Ranges, decode_attr, read_trials
from studies.trial_writes import Writes, new_trial

_AT_ONCE = 500  # ids in one query

Answer = TypeVar("Answer")


class EndedElsewhereError(OptunaError):
    """Trials were ended by another program, so that how they ended here is not written.

    No `UpdateFinishedTrialError`, which Optuna takes for something about the trial in its hands.
    """


@dataclass
class _Known:
    """What is known of a study.

    Attributes:
        trials: By number, in order.
        open: Those that are not finished, by id.
        ours: Ids of running trials that this process started.
        last_finished: Highest id of a finished trial; later ones may still be unknown.
    """

    trials: dict[int, FrozenTrial] = field(default_factory=dict)
    open: dict[int, FrozenTrial] = field(default_factory=dict)
    ours: set[int] = field(default_factory=set)
    last_finished: int = -1


class TrialStorage(BaseStorage):
    """An Optuna storage in a database, for one process that writes and any number that read.

    Trials that this process started are taken from memory, unless somebody else has ended them;
    trials of others are read when they are new or not finished.

    Args:
        backend: The database.
    """

    def __init__(self, backend: PatientStorage) -> None:
        self._backend = backend
        self._studies: dict[int, _Known] = {}
        self._places: dict[int, tuple[int, int]] = {}  # study and number by the trial's id
        self._lock = threading.RLock()
        self._writes = Writes()
        self._depth = 0  # of `at_once`
        self._fresh: set[int] = set()  # studies that were read in this `at_once`

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Write all that is written within in one transaction, at the end; other threads wait."""
        with self._lock:
            self._depth += 1
            try:
                yield
            except StoreError:  # what could not be written now cannot be in the next moment
                self._leave()
                self._writes = Writes()
                raise
            except BaseException:
                if self._leave():
                    with suppress(StoreError):  # what happened first is what is told
                        self._flush()
                raise
            if self._leave():
                self._flush()

    def _leave(self) -> bool:
        """Leave an `at_once`; say whether it was the outermost."""
        self._depth -= 1
        if self._depth == 0:
            self._fresh.clear()
        return self._depth == 0

    def create_new_study(
        self, directions: Sequence[StudyDirection], study_name: str | None = None
    ) -> int:
        """Create a study."""
        return self._backend.create_new_study(directions, study_name)

    def delete_study(self, study_id: int) -> None:
        """Delete a study."""
        with self._lock:
            self._backend.delete_study(study_id)
            self._studies.pop(study_id, None)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        """Write an attribute of a study."""
        self._backend_after_flush().set_study_user_attr(study_id, key, value)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Write an attribute of a study."""
        with self._written():
            self._writes.study_attr(study_id, key, value)

    def get_study_id_from_name(self, study_name: str) -> int:
        """Find a study."""
        return self._backend.get_study_id_from_name(study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        """Give a study's name."""
        return self._backend.get_study_name_from_id(study_id)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Give a study's directions."""
        return self._backend.get_study_directions(study_id)

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Read a study's attributes."""
        return self._backend.get_study_user_attrs(study_id)

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Read a study's attributes."""
        return self._backend_after_flush().get_study_system_attrs(study_id)

    def get_all_studies(self) -> list[FrozenStudy]:
        """List the studies."""
        return self._backend.get_all_studies()

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Create a trial; without a template it runs, and is this process's own."""
        with self._lock:
            if template_trial is not None:
                self._fresh.discard(study_id)
                return self._backend_after_flush().create_new_trial(study_id, template_trial)
            self._update(study_id)
            trial = self._flush(study_id)
            assert trial is not None
            known = self._studies[study_id]
            self._keep(study_id, [trial])
            known.ours.add(trial._trial_id)
            return trial._trial_id

    def set_trial_param(
        self,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
    ) -> None:
        """Write a parameter of a running trial."""
        with self._written():
            trial = self._changed(trial_id)
            first = next(iter(self._known(trial_id).trials.values()))
            if param_name in first.distributions:
                check_distribution_compatibility(first.distributions[param_name], distribution)
            value = distribution.to_external_repr(param_value_internal)
            trial.params = {**trial.params, param_name: value}
            trial.distributions = {**trial.distributions, param_name: distribution}
            self._writes.param(trial, param_name, param_value_internal)

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """End a running trial, or start one that waits.

        Returns:
            False if somebody else started it.
        """
        if state == TrialState.RUNNING:
            with self._lock:
                backend = self._backend_after_flush()
                if not backend.set_trial_state_values(trial_id, state, values):
                    return False
                self._own(trial_id)
                return True
        with self._written():
            trial, now = self._changed(trial_id), datetime.now()
            trial.state, trial.datetime_complete = state, now
            trial.values = None if values is None else list(values)
            trial.distributions = Ranges(trial.distributions)
            self._writes.end(trial_id, state, values, now)
            known = self._known(trial_id)
            known.open.pop(trial_id, None)
            known.ours.discard(trial_id)
        return True

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> None:
        """Write the objective of a running trial at a step."""
        with self._written():
            trial = self._changed(trial_id)
            trial.intermediate_values = {**trial.intermediate_values, step: intermediate_value}
            self._writes.rung(trial_id, step, intermediate_value)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Write an attribute of a running trial."""
        with self._written():
            trial = self._changed(trial_id)
            text = self._writes.trial_attr(trial_id, key, value, system=False)
            trial.user_attrs = {**trial.user_attrs, key: decode_attr(text)}

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Write an attribute of a running trial."""
        with self._written():
            trial = self._changed(trial_id)
            text = self._writes.trial_attr(trial_id, key, value, system=True)
            trial.system_attrs = {**trial.system_attrs, key: decode_attr(text)}

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Give a trial; one that is not finished as a copy, which Optuna's `Trial` writes to."""
        with self._lock:
            known = self._known(trial_id)
            study_id, number = self._places[trial_id]
            if trial_id in known.open and trial_id not in known.ours:
                self._update(study_id)
            trial = known.trials[number]
            return trial if trial.state.is_finished() else _copy(trial)

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """Give a study's trials, by number."""
        with self._lock:
            self._update(study_id)
            known = self._studies[study_id]
            if states is not None and not any(s.is_finished() and s in states for s in TrialState):
                some = sorted(known.open.values(), key=lambda t: t.number)
                trials = [t for t in some if t.state in states]
            else:
                trials = [t for t in known.trials.values() if states is None or t.state in states]
            return copy.deepcopy(trials) if deepcopy else trials

    def remove_session(self) -> None:
        """Close this thread's connection."""
        self._backend.remove_session()

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Write what is noted within, at once unless more is to come."""
        with self._lock:
            yield
            if self._depth == 0:
                self._flush()

    def _backend_after_flush(self) -> PatientStorage:
        with self._lock:
            self._flush()
            return self._backend

    def _flush(self, trial_of: int | None = None) -> FrozenTrial | None:
        """Write what is noted. If that fails, memory is no better than the database: forget it.

        Args:
            trial_of: A study that gets a new trial in the same transaction.

        Returns:
            The new trial.
        """
        writes, self._writes = self._writes, Writes()
        if not writes and trial_of is None:
            return None

        def write() -> tuple[list[int], FrozenTrial | None]:
            with self._backend.engine.begin() as connection:
                refused = writes.write(connection)
                if trial_of is None or refused:
                    return refused, None
                return refused, new_trial(connection, trial_of)

        try:
            refused, trial = self._backend.patiently(write)
        except BaseException:
            self._studies.clear()
            raise
        if refused:
            self._studies.clear()
            raise EndedElsewhereError(
                f"somebody else has ended {len(refused)} running trials of this process"
            )
        return trial

    def _known(self, trial_id: int) -> _Known:
        """Give what is known of a trial's study, the trial itself included.

        Raises:
            KeyError: There is no such trial.
        """
        if trial_id not in self._places or self._places[trial_id][0] not in self._studies:
            columns = select(TRIALS.c.study_id).where(TRIALS.c.trial_id == trial_id)
            study_id = self._query(lambda c: c.execute(columns).scalar_one_or_none())
            if study_id is None:
                raise KeyError(f"there is no trial with the id {trial_id}")
            self._update(study_id)
        return self._studies[self._places[trial_id][0]]

    def _changed(self, trial_id: int) -> FrozenTrial:
        """Put a copy of a trial in its place, to be written to.

        Raises:
            UpdateFinishedTrialError: It is finished.
            KeyError: There is no such trial.
        """
        known = self._known(trial_id)
        _, number = self._places[trial_id]
        trial = known.trials[number]
        self.check_trial_is_updatable(trial_id, trial.state)
        known.trials[number] = known.open[trial_id] = changed = _twin(trial)
        return changed

    def _own(self, trial_id: int) -> None:
        """Take over a trial that this process has just started."""
        known = self._known(trial_id)
        if known.trials[self._places[trial_id][1]].state != TrialState.RUNNING:
            self._read(self._places[trial_id][0], [trial_id])
        known.ours.add(trial_id)

    def _update(self, study_id: int) -> None:
        """Read what is new or may have changed.

        Raises:
            KeyError: There is no such study.
        """
        if study_id in self._fresh and study_id in self._studies:
            return
        known = self._studies.get(study_id)
        if known is None:
            self._backend.get_study_directions(study_id)  # raises where there is no such study
            self._studies[study_id] = _Known()
            of_study = select(TRIALS.c.trial_id).where(TRIALS.c.study_id == study_id)
            self._read(study_id, of_study)
        else:
            news = self._news(study_id, known)
            for part in _parts(news):
                self._read(study_id, part)
        if self._depth:
            self._fresh.add(study_id)

    def _news(self, study_id: int, known: _Known) -> list[int]:
        """Find the trials that are new, have another state, or run in another process."""
        ids = TRIALS.c.trial_id
        some = select(ids, TRIALS.c.state).where(TRIALS.c.study_id == study_id)
        rows = self._query(partial(_rows, some.where(ids > known.last_finished)))
        for part in _parts([i for i in known.open if i <= known.last_finished]):
            rows += self._query(partial(_rows, some.where(ids.in_(part))))
        theirs = known.open.keys() - known.ours
        news = []
        for trial_id, state in rows:
            place = self._places.get(trial_id)
            trial = None if place is None else known.trials.get(place[1])
            changed = trial is None or (trial_id in known.open and trial.state != state)
            if changed or (state == TrialState.RUNNING and trial_id in theirs):
                news.append(trial_id)
        return news

    def _read(self, study_id: int, ids: Sequence[int] | Select[tuple[int]]) -> None:
        self._keep(study_id, self._query(lambda c: read_trials(c, lambda id_: id_.in_(ids))))

    def _query(self, ask: Callable[[Connection], Answer]) -> Answer:
        """Ask the database, and wait for trouble that passes."""

        def once() -> Answer:
            with self._backend.engine.connect() as connection:
                return ask(connection)

        return self._backend.patiently(once)

    def _keep(self, study_id: int, trials: Sequence[FrozenTrial]) -> None:
        """Take trials that were read into memory."""
        known = self._studies[study_id]
        in_order = True
        for trial in trials:
            number, trial_id = trial.number, trial._trial_id
            in_order = in_order and (number in known.trials or number == len(known.trials))
            known.trials[number] = trial
            self._places[trial_id] = (study_id, number)
            known.open.pop(trial_id, None)
            if trial.state.is_finished():
                known.ours.discard(trial_id)
                known.last_finished = max(known.last_finished, trial_id)
            else:
                known.open[trial_id] = trial
        if not in_order:
            known.trials = dict(sorted(known.trials.items()))


def _rows(query: Select[Any], connection: Connection) -> list[Any]:
    return list(connection.execute(query))


def _parts(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[i : i + _AT_ONCE] for i in range(0, len(ids), _AT_ONCE)]


def _copy(trial: FrozenTrial) -> FrozenTrial:
    """Copy a trial so that adding to its dictionaries leaves the original alone."""
    other = _twin(trial)
    other.params, other.distributions = dict(trial.params), dict(trial.distributions)
    other.user_attrs, other.system_attrs = dict(trial.user_attrs), dict(trial.system_attrs)
    other.intermediate_values = dict(trial.intermediate_values)
    return other


def _twin(trial: FrozenTrial) -> FrozenTrial:
    """Copy a trial that shares its dictionaries; `copy.copy` takes five times as long."""
    other = FrozenTrial.__new__(FrozenTrial)
    other.__dict__.update(trial.__dict__)
    return other
