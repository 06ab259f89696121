"""Remember the trials of a database's studies, and read only what is new or may have changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection, Select, select

from studies.patient import PatientStorage
from studies.trial_rows import TRIALS, read_trials

_AT_ONCE = 500  # ids in one query

Answer = TypeVar("Answer")


@dataclass
class Known:
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


class TrialMemory:
    """What is known of the trials in a database.

    Trials that this process started are taken from memory, unless somebody else has ended them;
    trials of others are read when they are new or not finished.

    Args:
        backend: the database.
    """

    def __init__(self, backend: PatientStorage) -> None:
        self._backend = backend
        self._studies: dict[int, Known] = {}
        self._places: dict[int, tuple[int, int]] = {}  # study and number by the trial's id

    def __contains__(self, study_id: int) -> bool:
        return study_id in self._studies

    def __getitem__(self, study_id: int) -> Known:
        return self._studies[study_id]

    def forget(self, study_id: int | None = None) -> None:
        """Forget a study, or all of them."""
        if study_id is None:
            self._studies.clear()
        else:
            self._studies.pop(study_id, None)

    def study_of(self, trial_id: int) -> int:
        """Find a trial's study, and read it if it is not known.

        Raises:
            KeyError: There is no such trial.
        """
        if trial_id not in self._places or self._places[trial_id][0] not in self._studies:
            columns = select(TRIALS.c.study_id).where(TRIALS.c.trial_id == trial_id)
            study_id = self._query(lambda c: c.execute(columns).scalar_one_or_none())
            if study_id is None:
                raise KeyError(f"there is no trial with the id {trial_id}")
            self.update(study_id)
        return self._places[trial_id][0]

    def trial(self, trial_id: int) -> FrozenTrial:
        """Give a trial as it is known.

        Raises:
            KeyError: There is no such trial.
        """
        return self._studies[self.study_of(trial_id)].trials[self._places[trial_id][1]]

    def change(self, trial_id: int) -> FrozenTrial:
        """Put a twin of an unfinished trial in its place, to be written to."""
        twin = twin_of(self.trial(trial_id))
        study_id, number = self._places[trial_id]
        known = self._studies[study_id]
        known.trials[number] = known.open[trial_id] = twin
        return twin

    def own(self, trial_id: int) -> None:
        """Take over a trial that this process has just started."""
        study_id = self.study_of(trial_id)
        if self.trial(trial_id).state != TrialState.RUNNING:
            self._read(study_id, [trial_id])
        self._studies[study_id].ours.add(trial_id)

    def reread(self, trial_id: int) -> FrozenTrial:
        """Read a trial anew, to which nothing is about to be written, and give it."""
        self._read(self.study_of(trial_id), [trial_id])
        return self.trial(trial_id)

    def update(self, study_id: int, leave: Collection[int] = ()) -> None:
        """Read what is new or may have changed.

        Args:
            study_id: Of the study.
            leave: Ids of trials that are left as they are known, as they are about to be written.

        Raises:
            KeyError: There is no such study.
        """
        known = self._studies.get(study_id)
        if known is None:
            self._backend.get_study_directions(study_id)  # raises where there is no such study
            self._studies[study_id] = Known()
            of_study = select(TRIALS.c.trial_id).where(TRIALS.c.study_id == study_id)
            self._read(study_id, of_study)
        else:
            news = [i for i in self._news(study_id, known) if i not in leave]
            for part in _parts(news):
                self._read(study_id, part)

    def keep(self, study_id: int, trials: Sequence[FrozenTrial]) -> None:
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

    def _news(self, study_id: int, known: Known) -> list[int]:
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
        self.keep(study_id, self._query(lambda c: read_trials(c, lambda id_: id_.in_(ids))))

    def _query(self, ask: Callable[[Connection], Answer]) -> Answer:
        """Ask the database, and wait for trouble that passes."""

        def once() -> Answer:
            with self._backend.engine.connect() as connection:
                return ask(connection)

        return self._backend.patiently(once)


def _rows(query: Select[Any], connection: Connection) -> list[Any]:
    return list(connection.execute(query))


def _parts(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[i : i + _AT_ONCE] for i in range(0, len(ids), _AT_ONCE)]


def twin_of(trial: FrozenTrial) -> FrozenTrial:
    """Copy a trial that shares its dictionaries; `copy.copy` takes five times as long."""
    twin = FrozenTrial.__new__(FrozenTrial)
    twin.__dict__.update(trial.__dict__)
    return twin
