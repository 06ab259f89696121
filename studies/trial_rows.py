"""Read trials from Optuna's tables, thousands of them with a parameter per layer in a moment.

Optuna's own reader makes an object per row, and a trial has a row per layer. Here a trial's
parameters come from one attribute that is written together with them, `PARAMS_ATTR`; trials that
lack it, of older versions or of other programs, are read from the rows. What comes out is the same
`FrozenTrial`, but for large attributes, which are decoded only when somebody looks into them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    IntDistribution,
    json_to_distribution,
)
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial
from sqlalchemy import Connection, Table, select
from sqlalchemy.sql import ColumnElement

from studies.encoding import param_names
from studies.patient import StoreError

PARAMS_ATTR = "budget:params"  # system attribute: {"experts": [...], "low": [...], "high": [...]}
_LARGE = 1000  # characters from which on an attribute is decoded on demand

TRIALS: Table = models.TrialModel.__table__
VALUES: Table = models.TrialValueModel.__table__
PARAMS: Table = models.TrialParamModel.__table__
USER_ATTRS: Table = models.TrialUserAttributeModel.__table__
SYSTEM_ATTRS: Table = models.TrialSystemAttributeModel.__table__
RUNGS: Table = models.TrialIntermediateValueModel.__table__

Condition = Callable[[Any], ColumnElement[bool]]  # on a column with the trials' ids


class LazyJson(Mapping[str, Any]):
    """A JSON object that is decoded each time somebody looks into it, and kept as text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __getitem__(self, key: str) -> Any:
        return json.loads(self._text)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(json.loads(self._text))

    def __len__(self) -> int:
        return len(json.loads(self._text))


class Ranges(dict[str, BaseDistribution]):
    """Ranges of parameters by name; a deep copy shares them, as nothing ever changes a range."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> dict[str, BaseDistribution]:
        return dict(self)


def read_trials(connection: Connection, which: Condition) -> list[FrozenTrial]:
    """Read trials with all that belongs to them.

    Args:
        connection: To the database.
        which: Selects them by a column of ids.

    Returns:
        The trials, in the order of their ids.

    Raises:
        StoreError: One holds what neither Optuna nor we write.
    """
    try:
        return _read_trials(connection, which)
    except (LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise StoreError(
            f"a trial in the store cannot be read ({text:.200}): the store is damaged, or another "
            "program wrote to it; bring back a copy of it"
        ) from error


def _read_trials(connection: Connection, which: Condition) -> list[FrozenTrial]:
    columns = TRIALS.c
    chosen = select(
        columns.trial_id,
        columns.number,
        columns.state,
        columns.datetime_start,
        columns.datetime_complete,
    ).where(which(columns.trial_id))
    trials = {
        trial_id: FrozenTrial(
            number=number,
            state=state,
            value=None,
            datetime_start=_local(start),
            datetime_complete=_local(complete),
            params={},
            distributions={},
            user_attrs={},
            system_attrs={},
            intermediate_values={},
            trial_id=trial_id,
        )
        for trial_id, number, state, start, complete in connection.execute(
            chosen.order_by(columns.trial_id)
        )
    }
    _read_values(connection, which, trials)
    for table, attribute in ((USER_ATTRS, "user_attrs"), (SYSTEM_ATTRS, "system_attrs")):
        rows = select(table.c.trial_id, table.c.key, table.c.value_json)
        for trial_id, key, text in connection.execute(rows.where(which(table.c.trial_id))):
            if trial_id in trials:  # the others began after the query above
                getattr(trials[trial_id], attribute)[key] = decode_attr(text)
    _read_params(connection, which, trials)
    return list(trials.values())


def params_attr(trial: FrozenTrial) -> str | None:
    """Write a trial's parameters and their ranges as the text of one attribute.

    Returns:
        None where they are not those of an allocation.
    """
    ranges = list(trial.distributions.values())
    if list(trial.params) != _names(len(ranges)) or not all(map(_is_plain, ranges)):
        return None
    document = {
        "experts": list(trial.params.values()),
        "low": [range_.low for range_ in ranges],  # type: ignore[attr-defined]
        "high": [range_.high for range_ in ranges],  # type: ignore[attr-defined]
    }
    return json.dumps(document, separators=(",", ":"))


def _is_plain(range_: BaseDistribution) -> bool:
    return isinstance(range_, IntDistribution) and range_.step == 1 and not range_.log


def _read_values(
    connection: Connection, which: Condition, trials: Mapping[int, FrozenTrial]
) -> None:
    """Read objectives and rungs."""
    table = VALUES.c
    rows = select(table.trial_id, table.value, table.value_type).order_by(table.objective)
    of_value = models.TrialValueModel.stored_repr_to_value
    found: dict[int, list[float]] = defaultdict(list)
    for trial_id, value, kind in connection.execute(rows.where(which(table.trial_id))):
        found[trial_id].append(of_value(value, kind))
    for trial_id in found.keys() & trials.keys():
        trials[trial_id].values = found[trial_id]
    table = RUNGS.c
    steps = select(
        table.trial_id, table.step, table.intermediate_value, table.intermediate_value_type
    )
    of_rung = models.TrialIntermediateValueModel.stored_repr_to_intermediate_value
    for trial_id, step, value, kind in connection.execute(steps.where(which(table.trial_id))):
        if trial_id in trials:
            trials[trial_id].intermediate_values[step] = of_rung(value, kind)


def _read_params(
    connection: Connection, which: Condition, trials: Mapping[int, FrozenTrial]
) -> None:
    """Take the parameters from the trials' attributes, the missing ones from their rows."""
    missing = []
    for trial_id, trial in trials.items():
        attr = trial.system_attrs.get(PARAMS_ATTR)
        if attr is None:
            missing.append(trial_id)
            continue
        names = _names(len(attr["experts"]))
        trial.params = dict(zip(names, attr["experts"], strict=True))
        # One dictionary for all trials: a stored trial is never written to, see TrialStorage.
        trial.distributions = _ranges(tuple(attr["low"]), tuple(attr["high"]))
    if not missing:
        return
    table = PARAMS.c
    rows = select(table.trial_id, table.param_name, table.param_value, table.distribution_json)
    few = len(missing) <= 500
    wanted = table.trial_id.in_(missing) if few else which(table.trial_id)
    lacking = set(missing)
    for trial_id, name, value, text in connection.execute(
        rows.where(wanted).order_by(table.param_id)
    ):
        if trial_id in lacking:
            range_ = _range(text)
            trials[trial_id].params[name] = range_.to_external_repr(value)
            trials[trial_id].distributions[name] = range_


def decode_attr(text: str) -> Any:
    """Decode an attribute, a large object later."""
    if len(text) >= _LARGE and text.startswith("{") and not text.startswith('{"experts'):
        return LazyJson(text)
    return json.loads(text)


def _local(moment: datetime | None) -> datetime | None:
    """Turn the tables' UTC into local time without a zone, as Optuna does."""
    if moment is None:
        return None
    return moment.replace(tzinfo=timezone.utc).astimezone().replace(tzinfo=None)


@lru_cache(maxsize=1000)
def _range(text: str) -> BaseDistribution:
    return json_to_distribution(text)


@lru_cache(maxsize=8)
def _names(num_layers: int) -> list[str]:
    return param_names(num_layers)


@lru_cache(maxsize=8)
def _ranges(lows: Sequence[int], highs: Sequence[int]) -> Ranges:
    ranges = (IntDistribution(low, high) for low, high in zip(lows, highs, strict=True))
    return Ranges(zip(_names(len(lows)), ranges, strict=True))
