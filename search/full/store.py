"""Keep full fine-tunes in the store: a study beside the search's, a trial per finished run."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import optuna
from optuna.distributions import IntDistribution
from optuna.trial import TrialState, create_trial

from mola.allocation import Allocation
from search.full.results import Conditions, Run, differences
from studies.encoding import to_params
from studies.patient import OnTrouble
from studies.storage import connect, one_line_errors
from studies.strict import decode

CONDITIONS_ATTR = "full:conditions"
RUN_ATTR = "full:run"


def comparison_name(study: str) -> str:
    """Name the study that holds the full fine-tunes of a search."""
    return f"{study}.full"


def open_comparison(
    study: str, url: str, conditions: Conditions, on_trouble: OnTrouble | None = None
) -> optuna.Study:
    """Create the record of a search's full fine-tunes, or go on with it.

    Args:
        study: Name of the search's study.
        url: Of its storage.
        conditions: Common to all runs.
        on_trouble: Told of trouble with the storage that may pass, which is then waited for.

    Raises:
        ValueError: The runs so far were made under other conditions (each is named), or the
            storage cannot be used.
    """
    name = comparison_name(study)
    storage = connect(url, create=False, on_trouble=on_trouble)
    with one_line_errors(url):
        found = optuna.create_study(
            study_name=name,
            storage=storage,
            sampler=optuna.samplers.RandomSampler(),
            direction="minimize",
            load_if_exists=True,
        )
        if CONDITIONS_ATTR not in found.user_attrs:
            found.set_user_attr(CONDITIONS_ATTR, json.dumps(dataclasses.asdict(conditions)))
    if changed := differences(conditions, conditions_of(found)):
        raise ValueError(
            f"the runs of {name!r} were made under other conditions: {'; '.join(changed)}. "
            "Use the same ones, or delete that study first (optuna delete-study)"
        )
    return found


def conditions_of(comparison: optuna.Study) -> Conditions:
    """Read what all runs have in common.

    Raises:
        ValueError: Another program or version wrote it.
    """
    text = comparison.user_attrs.get(CONDITIONS_ATTR)
    conditions: Conditions = _decode(text, Conditions, f"{comparison.study_name!r}: conditions")
    return conditions


def find_comparison(study: optuna.Study) -> optuna.Study | None:
    """Find the record of a study's full fine-tunes, if there is one."""
    name = comparison_name(study.study_name)
    if name not in optuna.get_all_study_names(study._storage):
        return None
    return optuna.load_study(study_name=name, storage=study._storage)


def runs_of(comparison: optuna.Study) -> list[Run]:
    """Give the finished runs, in the order in which they finished.

    Raises:
        ValueError: Another program or version wrote one.
    """
    trials = comparison.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    where = f"{comparison.study_name!r}: run"
    return [_decode(t.user_attrs.get(RUN_ATTR), Run, f"{where} {t.number}") for t in trials]


def record_run(comparison: optuna.Study, run: Run) -> None:
    """Record a finished run, all at once."""
    attrs = {
        RUN_ATTR: json.dumps(dataclasses.asdict(run)),
        "name": run.name,
        "seed": run.seed,
        "accuracy": run.validation.accuracy,
        "test": None if run.test is None else run.test.objective,
    }
    _add(comparison, Allocation(run.experts), attrs, TrialState.COMPLETE, run.validation.objective)


def record_failure(
    comparison: optuna.Study, name: str, allocation: Allocation, seed: int, reason: str
) -> None:
    """Record why a run failed; the same command tries it again."""
    attrs = {"name": name, "seed": seed, "reason": reason}
    _add(comparison, allocation, attrs, TrialState.FAIL, None)


def _decode(text: object, hint: Any, where: str) -> Any:
    """Read JSON that is kept as a text."""
    try:
        return decode(json.loads(str(text)), hint, where)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{where} is not what this program writes") from None


def _add(
    comparison: optuna.Study,
    allocation: Allocation,
    attrs: dict[str, Any],
    state: TrialState,
    value: float | None,
) -> None:
    highest = IntDistribution(0, max(1, *allocation.experts))
    params = to_params(allocation)
    comparison.add_trial(
        create_trial(
            state=state,
            value=value,
            params=params,
            distributions=dict.fromkeys(params, highest),
            user_attrs=attrs,
        )
    )
