"""Say which studies are the budgets of one search: `mine-96` and `mine-128` of `mine`.

Each is a study of its own, which all commands know. What makes them one search is written in each.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path

import optuna

from studies.catalog import find_studies
from studies.storage import STORE_FILE, sqlite_path
from studies.store import load_study, storage_url

GROUP_ATTR = "budgets_of"  # of a study: the name that it shares with its other budgets
PARAMETERS_ATTR = "parameters_per_expert"  # of a study: trainable parameters by layer


def member_name(name: str, total: int) -> str:
    """Name the study of one budget."""
    return f"{name}-{total}"


def join(study: optuna.Study, name: str, parameters: tuple[int, ...]) -> None:
    """Write into a study that it is one budget of a search.

    Args:
        study: open for writing.
        name: of the search.
        parameters: trainable parameters of an expert, by layer.
    """
    for key, value in ((GROUP_ATTR, name), (PARAMETERS_ATTR, list(parameters))):
        if study.user_attrs.get(key) != value:
            study.set_user_attr(key, value)


def find_members(name: str, root: Path, storage: str | None) -> list[optuna.Study]:
    """Load the studies of a search over several budgets, the smallest first; empty without any.

    Args:
        name: of the search.
        root: folder of the studies.
        storage: URL, if they are not in the default place.

    Raises:
        ValueError: the storage cannot be read; one line.
    """
    ours = re.compile(re.escape(name) + r"-(\d+)")
    path = None if storage is None else sqlite_path(storage)
    if path is not None and not path.exists():
        return []
    if storage is None:
        places = root.glob(f"{glob.escape(name)}-*/{STORE_FILE}")
        names = [path.parent.name for path in places]
    else:
        names = [study for study, _ in find_studies(root, storage)[0]]
    totals = {study: int(match[1]) for study in names if (match := ours.fullmatch(study))}
    ordered = sorted(totals, key=lambda study: totals[study])
    found = [load_study(study, storage_url(root, study, storage)) for study in ordered]
    return [study for study in found if study.user_attrs.get(GROUP_ATTR) == name]


def check_single(name: str, root: Path, storage: str | None) -> None:
    """Refuse a name that several budgets share, whose report and settings would be lost.

    Raises:
        ValueError: there are such budgets, or the storage cannot be read.
    """
    members = find_members(name, root, storage)
    if members:
        theirs = ", ".join(study.study_name for study in members)
        raise ValueError(
            f"--study {name}: several budgets bear this name: {theirs}; name one of these, or "
            "another study"
        )
