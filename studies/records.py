"""Read a study's trials as plain data. The names of the attributes in the store are here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import optuna
from optuna.trial import FrozenTrial, TrialState

from mola.allocation import Allocation
from studies.encoding import param_names, to_params
from studies.files import write_text_atomic
from studies.once import OncePerTrial
from studies.shape import Check, each, experts, number, optional, require, text, whole
from studies.spec import StudySpec
from studies.strict import shown

SEARCH = "search"  # label of a trial that the sampler proposed
NAMED = "named "  # beginning of the label of a named allocation's trial, before its names
PRIOR = "prior "  # beginning of the label of a trial of `--prior`, before the prior's name
REPLICATE = "replicate"  # label of a trial that repeats an allocation on a further seed

# Attributes of a study.
SPEC_ATTR = "spec"
CONCLUSION_ATTR = "conclusion"
PRIORS_ATTR = "priors"

# Attributes of a trial; those of RESULT_ATTRS carry the names of `mola.events.Finished`.
LABEL_ATTR = "label"
SEED_ATTR = "seed"
REASON_ATTR = "reason"  # why it failed
BLAMELESS_ATTR = "interrupted"  # it failed because it was ended from outside
RETRY_ATTR = "retry_of"
SAVE_MEMORY_ATTR = "save_memory"  # it runs again after too little memory, more thriftily
_NOT_IN_CSV = ("routing", "began", "ended")  # a cell is a number or a short text
RESULT_ATTRS = ("accuracy", "standard_error", "train_seconds", "eval_seconds", "routing")


# What the attributes are, as far as they are read. A single row has no standard error: NaN.
_TRIAL: dict[str, Check] = {
    SEED_ATTR: whole,
    LABEL_ATTR: text,
    REASON_ATTR: text,
    RETRY_ATTR: whole,
    "accuracy": number,
    "standard_error": lambda value: number(value) or (type(value) is float and math.isnan(value)),
    "train_seconds": number,
    "eval_seconds": number,
    "routing": lambda value: isinstance(value, Mapping),
}
_CONCLUSION: dict[str, Check] = {
    "text": text,
    "winner": optional(whole),
    "confidence": number,
    "fresh_seeds": each(whole),
    "table": lambda value: isinstance(value, list),
}
_ROW: dict[str, Check] = {
    "names": each(text),
    "trial": whole,
    "mean": number,
    "standard_error": optional(number),
    "seeds": whole,
    "accuracy": number,
    **dict.fromkeys(("difference", "low", "high"), optional(number)),
}


@dataclass(frozen=True)
class TrialRecord:
    """A trial as plain data.

    Attributes:
        number: Optuna's number of the trial, from 0.
        state: WAITING, RUNNING, COMPLETE, PRUNED or FAIL.
        allocation: What is trained.
        seed: Seed of the data order, dropout and fresh weights.
        label: `search`, `replicate`, `named ...` or `prior ...`.
        objective: Validation objective in the study's unit; of a pruned trial the last one.
        accuracy: Fraction of validation rows that are right; None unless complete.
        standard_error: Of the objective over the validation rows; None unless complete.
        rungs: Objective by step, of the evaluations before the last.
        seconds: Wall clock from ask to tell; None before that.
        reason: Why it failed, else empty.
        retry_of: Number of the trial that this one repeats after a failure.
        train_seconds: Wall clock of its training steps; None unless complete.
        eval_seconds: Wall clock of its evaluations; None unless complete.
        routing: Expert load and router entropy per layer; empty unless complete.
        began: When it was asked for, local time; None while it waits.
        ended: When it was told; None before that.
    """

    number: int
    state: str
    allocation: Allocation
    seed: int
    label: str
    objective: float | None
    accuracy: float | None
    standard_error: float | None
    rungs: dict[int, float]
    seconds: float | None
    reason: str
    retry_of: int | None
    train_seconds: float | None = None
    eval_seconds: float | None = None
    routing: Mapping[str, Any] = field(default_factory=dict)
    began: datetime | None = None
    ended: datetime | None = None


class ForeignDataError(ValueError):
    """Another program wrote to a study what this one cannot understand; one line."""


def study_spec(study: optuna.Study) -> StudySpec:
    """Read what a study searches.

    Raises:
        ValueError: The study was made by another program or another version.
    """
    text = study.user_attrs.get(SPEC_ATTR)
    if not isinstance(text, str):
        raise ValueError(f"the study {study.study_name!r} was not made by mola-search")
    return StudySpec.from_json(text)


def get_conclusion(study: optuna.Study) -> dict[str, Any] | None:
    """Read what the search found; None while it goes on.

    Raises:
        ValueError: Another program or version wrote it.
    """
    conclusion: dict[str, Any] | None = study.user_attrs.get(CONCLUSION_ATTR)
    if conclusion is not None:
        where = f"the study {study.study_name!r}: conclusion"
        require(conclusion, _CONCLUSION, where)
        row = {**_ROW, "experts": experts(study_spec(study).num_layers)}
        for place, found in enumerate(conclusion["table"]):
            require(found, row, f"{where}.table[{place}]")
    return conclusion


def get_priors(study: optuna.Study) -> dict[str, Any]:
    """Read the priors that the study was given so far.

    Returns:
        By name: `experts` per layer, `scores` per layer or None, and, where another search gave
        them, `source`: what it was (`search.priors.transfer`).

    Raises:
        ValueError: Another program or version wrote them.
    """
    priors: dict[str, Any] = study.user_attrs.get(PRIORS_ATTR, {})
    where = f"the study {study.study_name!r}: priors"
    require(priors, {}, where)
    for name, prior in priors.items():
        shape = {"experts": each(whole), "scores": optional(each(number))}
        require(prior, shape, f"{where}.{name:.40}")
    return dict(priors)


def records(study: optuna.Study) -> list[TrialRecord]:
    """Give all trials in the order of their numbers.

    A trial whose driver was killed while the proposal was being written has no allocation, and
    is left out; with a result it would have one.

    Raises:
        ForeignDataError: Another program wrote the study or one of its trials.
    """
    all_trials = study.get_trials(deepcopy=False)
    try:
        return [record for record in _reader(study)(all_trials) if record is not None]
    except ValueError as error:
        raise ForeignDataError(f"the study {study.study_name!r}: {error}") from None


def write_trials_csv(study: optuna.Study, path: Path) -> None:
    """Write a row per trial, as it stands now, in one go.

    Raises:
        OSError: The file cannot be written; an older one is as it was.
    """
    import pandas as pd  # slow to import, and only this needs it

    whole = dict.fromkeys(("number", "seed", "retry_of"), "Int64")
    columns = [key for key in TrialRecord.__dataclass_fields__ if key not in _NOT_IN_CSV]
    rows = []
    for record in records(study):
        row = {key: getattr(record, key) for key in columns}
        rungs = {f"rung_{step}": value for step, value in sorted(row.pop("rungs").items())}
        rows.append({**row, **rungs, **to_params(record.allocation)})
    table = pd.DataFrame(rows, columns=None if rows else columns)
    text: str = table.astype(whole).to_csv(index=False, lineterminator="\n")
    write_text_atomic(path, text)


_readers: WeakKeyDictionary[optuna.Study, OncePerTrial[TrialRecord | None]] = WeakKeyDictionary()


def _reader(study: optuna.Study) -> OncePerTrial[TrialRecord | None]:
    """Give what makes records of a study's trials; it remembers those that it has made."""
    reader = _readers.get(study)
    if reader is None:
        spec = study_spec(study)
        names, seed = param_names(spec.num_layers), spec.seed
        reader = _readers[study] = OncePerTrial(lambda trial: _record(trial, names, seed))
    return reader


def _record(trial: FrozenTrial, names: list[str], seed: int) -> TrialRecord | None:
    allocation = _allocation(trial, names)
    if allocation is None:
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
            raise ValueError(f"trial {trial.number} has a result, but no allocation")
        return None
    attrs = trial.user_attrs
    _check(trial)
    start, end = trial.datetime_start, trial.datetime_complete
    return TrialRecord(
        number=trial.number,
        state=trial.state.name,
        allocation=allocation,
        seed=attrs.get(SEED_ATTR, seed),
        label=attrs.get(LABEL_ATTR, SEARCH),
        objective=trial.value if trial.values else None,
        accuracy=attrs.get("accuracy"),
        standard_error=attrs.get("standard_error"),
        rungs=dict(trial.intermediate_values),
        seconds=(end - start).total_seconds() if start and end else None,
        reason=attrs.get(REASON_ATTR, ""),
        retry_of=attrs.get(RETRY_ATTR),
        train_seconds=attrs.get("train_seconds"),
        eval_seconds=attrs.get("eval_seconds"),
        routing=attrs.get("routing", {}),
        began=start,
        ended=end,
    )


def _check(trial: FrozenTrial) -> None:
    """Refuse attributes that this program does not write; a complete trial has its numbers."""
    attrs = trial.user_attrs
    for key, check in _TRIAL.items():
        if key in attrs and not check(attrs[key]):
            raise ValueError(f"{key} of trial {trial.number} cannot be {shown(attrs[key])}")
    done = trial.state == TrialState.COMPLETE
    if done and not (number(attrs.get("accuracy")) and number(trial.value)):
        raise ValueError(
            f"trial {trial.number} was completed by another program: it has no accuracy, or no "
            "finite objective"
        )


def _allocation(trial: FrozenTrial, names: list[str]) -> Allocation | None:
    """Read a trial's allocation, from where an enqueued trial keeps it until it is asked for."""
    params: Mapping[str, int] = trial.params
    if len(params) < len(names):
        params = {**trial.system_attrs.get("fixed_params", {}), **params}
    try:
        return Allocation([params[name] for name in names])
    except KeyError:
        return None
    except ValueError as error:
        raise ValueError(f"trial {trial.number}: {error}") from None
