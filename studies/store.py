"""Open studies in an Optuna storage, the only memory that a search has.

`studies.outcomes` writes what becomes of their trials.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna_dashboard import save_note

from studies.note import study_note
from studies.outcomes import (
    at_once,
    complete,
    enqueue,
    fail,
    interrupt,
    mark,
    prune,
    reconcile,
    withdraw,
)
from studies.patient import OnTrouble
from studies.provenance import run_notes
from studies.records import (
    CONCLUSION_ATTR,
    PRIORS_ATTR,
    REPLICATE,
    SEARCH,
    SPEC_ATTR,
    TrialRecord,
    get_conclusion,
    get_priors,
    records,
    study_spec,
    write_trials_csv,
)
from studies.spec import StudySpec
from studies.storage import (
    STORE_FILE,
    check_study_name,
    connect,
    mask,
    one_line_errors,
    sqlite_path,
    sqlite_url,
)
from studies.trial_storage import TrialStorage

__all__ = [
    "REPLICATE",
    "SEARCH",
    "TrialRecord",
    "at_once",
    "complete",
    "enqueue",
    "fail",
    "get_conclusion",
    "interrupt",
    "load_study",
    "mark",
    "open_study",
    "prune",
    "reconcile",
    "records",
    "set_conclusion",
    "set_priors",
    "storage_url",
    "study_spec",
    "withdraw",
    "write_trials_csv",
]


def storage_url(root: Path, name: str, url: str | None) -> str:
    """Say where a study is stored: at the URL if there is one, else in a file under the root.

    Raises:
        ValueError: The name cannot be that of a folder, or the URL is none.
    """
    check_study_name(name)
    if url is None:
        return sqlite_url(root / name / STORE_FILE)
    sqlite_path(url)
    return url


def open_study(
    name: str,
    url: str,
    spec: StudySpec,
    *,
    sampler: optuna.samplers.BaseSampler,
    pruner: optuna.pruners.BasePruner,
    on_trouble: OnTrouble | None = None,
) -> optuna.Study:
    """Create a study, or go on with the one of that name if it is the same search.

    Args:
        name: Of the study.
        url: Of its storage.
        spec: What is searched.
        sampler: Proposes.
        pruner: Judges rungs.
        on_trouble: Told of trouble with the storage that may pass, which is then waited for.

    Raises:
        ValueError: The study is another search (each difference is named), or the storage cannot
            be used. One line, without passwords.
    """
    check_study_name(name)
    storage = TrialStorage(connect(url, create=True, on_trouble=on_trouble))
    with one_line_errors(url):
        study = optuna.create_study(
            study_name=name,
            storage=storage,
            sampler=sampler,
            pruner=pruner,
            direction="minimize",
            load_if_exists=True,
        )
        _check_same(study, spec, url)
        # Written at each start: the note may have become better, and a storage that cannot be
        # written to is found out before anything is trained.
        save_note(study, study_note(spec))
    return study


def load_study(name: str, url: str) -> optuna.Study:
    """Open a study to read it.

    Raises:
        ValueError: There is no such study (the known ones are listed), or the storage cannot be
            used. One line, without passwords.
    """
    path = sqlite_path(url)
    if path is not None and not path.exists():
        raise ValueError(f"there is no study {name!r}: {path} does not exist{_others(path)}")
    storage = TrialStorage(connect(url, create=False))
    with one_line_errors(url):
        names = sorted(optuna.get_all_study_names(storage))
        if name not in names:
            known = ", ".join(map(repr, names[:20])) or "none"
            raise ValueError(f"there is no study {name!r} in {mask(url)}; known studies: {known}")
        return optuna.load_study(
            study_name=name,
            storage=storage,
            sampler=optuna.samplers.RandomSampler(),
            pruner=optuna.pruners.NopPruner(),
        )


def set_conclusion(study: optuna.Study, conclusion: Mapping[str, Any]) -> None:
    """Record what the search found, as JSON-able data; see `search.conclude`."""
    study.set_user_attr(CONCLUSION_ATTR, dict(conclusion))


def set_priors(study: optuna.Study, priors: Mapping[str, Any]) -> None:
    """Record the priors of a study, as JSON-able data; see `get_priors`."""
    study.set_user_attr(PRIORS_ATTR, dict(priors))


def _check_same(study: optuna.Study, spec: StudySpec, url: str) -> None:
    """Refuse a study that is another search; take one that nothing was written to yet."""
    where = f"study {study.study_name!r} in {mask(url)}"
    if [d.name for d in study.directions] != ["MINIMIZE"]:
        raise ValueError(f"{where} does not minimize one objective; use another --study")
    if SPEC_ATTR not in study.user_attrs and not study.get_trials(deepcopy=False):
        study.set_user_attr(SPEC_ATTR, spec.to_json())
        return
    differences = spec.differences(study_spec(study))
    # What the search would stumble over later, if another program has written to the study.
    for read in (records, get_conclusion, get_priors, run_notes):
        read(study)
    if differences:
        raise ValueError(
            f"{where} is another search: {'; '.join(differences)}. "
            "Use another --study, or the study's settings"
        )


def _others(path: Path) -> str:
    """List the studies beside one that is missing, where they lie in folders under a root."""
    if path.name != STORE_FILE:
        return ""
    names = sorted(p.parent.name for p in path.parent.parent.glob(f"*/{STORE_FILE}"))
    return f"; known studies: {', '.join(map(repr, names[:20]))}" if names else ""
