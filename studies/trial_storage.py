"""Keep a study's trials in memory beside Optuna's database, so that thousands of them stay quick.

Optuna reads a running trial anew, with a row per layer, each time that anybody asks for the trials,
and writes each parameter in a transaction of its own. Here what this process writes is known
without reading it back, and what belongs together is written at once. The database keeps Optuna's
tables and contents; the dashboard and other programs see no difference.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from studies.patient import PatientStorage, StoreError
from studies.trial_memory import Known, TrialMemory, twin_of
from studies.trial_rows import Ranges, decode_attr
from studies.trial_writes import Writes, new_trial


class EndedElsewhereError(OptunaError):
    """Trials were ended by another program, so that how they ended here is not written.

    No `UpdateFinishedTrialError`, which Optuna takes for something about the trial in its hands.

    Attributes:
        numbers: Of the trials.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"somebody else has ended {len(numbers)} running trials of this process")
        self.numbers = tuple(numbers)


class TrialStorage(BaseStorage):
    """An Optuna storage in a database, for one process that writes and any number that read.

    Args:
        backend: The database.
    """

    def __init__(self, backend: PatientStorage) -> None:
        self._backend = backend
        self._memory = TrialMemory(backend)
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
                    with suppress(StoreError, EndedElsewhereError):  # what came first is told
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
            self._memory.forget(study_id)

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
            known = self._memory[study_id]
            self._memory.keep(study_id, [trial])
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
                self._memory.own(trial_id)
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
            if trial_id in known.open and trial_id not in known.ours:
                self._update(self._memory.study_of(trial_id))
            trial = self._memory.trial(trial_id)
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
            known = self._memory[study_id]
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
            self._memory.forget()
            raise
        if refused:
            raise EndedElsewhereError([self._memory.reread(i).number for i in refused])
        return trial

    def _changed(self, trial_id: int) -> FrozenTrial:
        """Give a trial that may be written to.

        Raises:
            UpdateFinishedTrialError: It is finished.
            KeyError: There is no such trial.
        """
        self.check_trial_is_updatable(trial_id, self._memory.trial(trial_id).state)
        return self._memory.change(trial_id)

    def _known(self, trial_id: int) -> Known:
        return self._memory[self._memory.study_of(trial_id)]

    def _update(self, study_id: int) -> None:
        """Read what is new, once while an `at_once` lasts.

        Raises:
            KeyError: There is no such study.
        """
        if study_id not in self._fresh or study_id not in self._memory:
            self._memory.update(study_id, self._writes.trials)
            if self._depth:
                self._fresh.add(study_id)


def _copy(trial: FrozenTrial) -> FrozenTrial:
    """Copy a trial so that adding to its dictionaries leaves the original alone."""
    other = twin_of(trial)
    other.params, other.distributions = dict(trial.params), dict(trial.distributions)
    other.user_attrs, other.system_attrs = dict(trial.user_attrs), dict(trial.system_attrs)
    other.intermediate_values = dict(trial.intermediate_values)
    return other
