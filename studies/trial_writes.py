"""Write what belongs together to Optuna's tables in one transaction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from optuna.distributions import distribution_to_json
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import (
    Connection,
    Delete,
    Insert,
    Table,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)

from studies.trial_rows import (
    PARAMS,
    PARAMS_ATTR,
    RUNGS,
    SYSTEM_ATTRS,
    TRIALS,
    USER_ATTRS,
    VALUES,
    params_attr,
)

STUDY_ATTRS: Table = models.StudySystemAttributeModel.__table__


class Writes:
    """What is to be written.

    Attributes:
        ended: States, values and ends of trials, by their ids.
    """

    def __init__(self) -> None:
        self.ended: dict[int, tuple[TrialState, Sequence[float] | None, datetime]] = {}
        self._params: list[dict[str, Any]] = []
        self._with_params: dict[int, FrozenTrial] = {}
        self._attrs: dict[tuple[str, int, str], str] = {}  # by table, id and key
        self._rungs: dict[tuple[int, int], float] = {}

    def __bool__(self) -> bool:
        return bool(self.ended or self._params or self._attrs or self._rungs)

    @property
    def trials(self) -> set[int]:
        """Ids of the trials that something is to be written of."""
        of_attrs = {i for table, i, _ in self._attrs if table != STUDY_ATTRS.name}
        return {*self.ended, *self._with_params, *of_attrs, *(i for i, _ in self._rungs)}

    def param(self, trial: FrozenTrial, name: str, value: float) -> None:
        """Note a parameter of a trial that has it already; value: as the database keeps it."""
        row = (trial._trial_id, name, value, distribution_to_json(trial.distributions[name]))
        self._params.append(dict(zip(("of", "name", "text", "kind"), row, strict=True)))
        self._with_params[trial._trial_id] = trial

    def trial_attr(self, trial_id: int, key: str, value: Any, *, system: bool) -> str:
        """Note an attribute of a trial, and give its text.

        Raises:
            TypeError: The value cannot be written as JSON.
        """
        table = SYSTEM_ATTRS if system else USER_ATTRS
        text = self._attrs[table.name, trial_id, key] = json.dumps(value)
        return text

    def study_attr(self, study_id: int, key: str, value: Any) -> None:
        """Note a system attribute of a study."""
        self._attrs[STUDY_ATTRS.name, study_id, key] = json.dumps(value)

    def rung(self, trial_id: int, step: int, value: float) -> None:
        """Note an intermediate value."""
        self._rungs[trial_id, step] = value

    def end(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None, at: datetime
    ) -> None:
        """Note how a trial ended, and when in local time."""
        self.ended[trial_id] = (state, values, at)

    def write(self, connection: Connection) -> list[int]:
        """Write everything; to do it twice, as after a commit that a lost server did, does no harm.

        Returns:
            Trials that somebody else has ended, and whose end therefore is not written.
        """
        self._write_params(connection)
        owners = {SYSTEM_ATTRS: "trial_id", USER_ATTRS: "trial_id", STUDY_ATTRS: "study_id"}
        for table, owner in owners.items():
            rows = [
                {"of": i, "name": key, "text": text}
                for (name, i, key), text in self._attrs.items()
                if name == table.name
            ]
            _replace(connection, table, (owner, "key"), ("value_json",), rows)
        stored = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr
        rungs = [
            dict(zip(("of", "name", "text", "kind"), (i, step, *stored(value)), strict=True))
            for (i, step), value in self._rungs.items()
        ]
        columns = ("intermediate_value", "intermediate_value_type")
        _replace(connection, RUNGS, ("trial_id", "step"), columns, rungs)
        return self._write_ends(connection)

    def _write_params(self, connection: Connection) -> None:
        for trial_id, trial in self._with_params.items():
            attr = params_attr(trial)
            if attr is not None:
                self._attrs[SYSTEM_ATTRS.name, trial_id, PARAMS_ATTR] = attr
        columns = ("param_value", "distribution_json")
        _replace(connection, PARAMS, ("trial_id", "param_name"), columns, self._params)

    def _write_ends(self, connection: Connection) -> list[int]:
        refused = []
        stored = models.TrialValueModel.value_to_stored_repr
        unfinished = TRIALS.c.state.in_([TrialState.RUNNING, TrialState.WAITING])
        for trial_id, (state, values, at) in self.ended.items():
            ended = update(TRIALS).where(TRIALS.c.trial_id == trial_id, unfinished)
            moment = at.astimezone(timezone.utc).replace(tzinfo=None)
            if not connection.execute(ended.values(state=state, datetime_complete=moment)).rowcount:
                ours = select(TRIALS.c.state, TRIALS.c.datetime_complete)
                found = connection.execute(ours.where(TRIALS.c.trial_id == trial_id)).one()
                if tuple(found) != (state, moment):
                    refused.append(trial_id)
                continue
            for objective, value in enumerate(values or ()):
                number, kind = stored(value)
                row = {
                    "trial_id": trial_id,
                    "objective": objective,
                    "value": number,
                    "value_type": kind,
                }
                connection.execute(insert(VALUES), row)
        return refused


def new_trial(connection: Connection, study_id: int) -> FrozenTrial:
    """Begin a trial; the lock on the study keeps others from taking the same number.

    Raises:
        KeyError: There is no such study.
    """
    study = models.StudyModel.__table__.c.study_id
    if connection.execute(select(study).where(study == study_id).with_for_update()).first() is None:
        raise KeyError(f"there is no study with the id {study_id}")
    now = datetime.now()
    row = {
        "study_id": study_id,
        "state": TrialState.RUNNING,
        "datetime_start": now.astimezone(timezone.utc).replace(tzinfo=None),
    }
    inserted = connection.execute(insert(TRIALS), row).inserted_primary_key
    assert inserted is not None
    trial_id: int = inserted[0]
    earlier = select(func.count()).where(
        TRIALS.c.study_id == study_id, TRIALS.c.trial_id < trial_id
    )
    number = connection.execute(earlier).scalar_one()
    connection.execute(update(TRIALS).where(TRIALS.c.trial_id == trial_id).values(number=number))
    return FrozenTrial(
        number=number,
        state=TrialState.RUNNING,
        value=None,
        datetime_start=now,
        datetime_complete=None,
        params={},
        distributions={},
        user_attrs={},
        system_attrs={},
        intermediate_values={},
        trial_id=trial_id,
    )


def _replace(
    connection: Connection,
    table: Table,
    key: tuple[str, str],
    values: tuple[str, ...],
    rows: list[dict[str, Any]],
) -> None:
    """Write rows in place of those with the same key.

    Args:
        connection: In a transaction.
        table: Where.
        key: Columns that are unique together.
        values: The other columns.
        rows: `of`, `name`: the key; then the values as `text` and `kind`.
    """
    if rows:
        old, fresh = _replacement(table, key, values)
        connection.execute(old, [{"of": row["of"], "name": row["name"]} for row in rows])
        connection.execute(fresh, rows)


@lru_cache(maxsize=8)
def _replacement(
    table: Table, key: tuple[str, str], values: tuple[str, ...]
) -> tuple[Delete, Insert]:
    """Give the two statements of `_replace`; to build them takes as long as to execute them."""
    fields = ("of", "name", "text", "kind")
    owner, name = (table.c[column] for column in key)
    old = delete(table).where(owner == bindparam("of"), name == bindparam("name"))
    columns: dict[str, Any] = {
        c: bindparam(field) for c, field in zip((*key, *values), fields, strict=False)
    }
    return old, insert(table).values(columns)
