"""Hold a study for all the objects of this process that work on it, until the last one is gone.

Ray Tune copies and pickles its search algorithms as it likes, so that none of them can be the one
that holds the study.
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import ExitStack

import optuna
from optuna.storages import RDBStorage

from studies.claim import claim
from studies.storage import sqlite_path

_log = logging.getLogger(__name__)


class SharedClaim:
    """A claim on a study, held as long as this object is referred to; see `share_claim`.

    Args:
        study: To be worked on.
        url: Of its storage.
    """

    def __init__(self, study: optuna.Study, url: str) -> None:
        stack = ExitStack()
        held = stack.enter_context(claim(study, url, _log.warning))
        weakref.finalize(self, stack.close)  # at the end of the process, too
        self.check = held.check


# by process, since a forked one inherits those of its parent; by database; and by study
_shared: weakref.WeakValueDictionary[tuple[int, str, str], SharedClaim] = (
    weakref.WeakValueDictionary()
)


def share_claim(study: optuna.Study) -> SharedClaim | None:
    """Claim a study for this process, or give the claim that it has already.

    Returns:
        To be kept; None for a storage of which there can be no claim: it is in memory, or no
        database.

    Raises:
        ValueError: Another process holds the study; says which.
    """
    database = getattr(study._storage, "_backend", study._storage)  # behind what caches trials
    if not isinstance(database, RDBStorage):
        return None
    url: str = database.url
    try:
        path = sqlite_path(url)
    except ValueError:  # in memory
        return None
    store = url if path is None else str(path.resolve())  # a file has many names, and one lock
    key = os.getpid(), store, study.study_name
    shared = _shared.get(key)
    if shared is None:
        shared = _shared[key] = SharedClaim(study, url)
    return shared
