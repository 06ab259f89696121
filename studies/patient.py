"""Keep a storage usable through trouble that passes: a full or read-only disk, a lock, a restart.

Every operation of Optuna's storage is one transaction, so that one that failed can be tried again.
What does not pass, or not soon, becomes one clear error; passwords are masked by the caller.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import func
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError

PATIENCE_SECONDS = 15 * 60.0
"""How long the same trouble may last, counted in the pauses between the tries: neither a clock that
jumps nor a process that was suspended uses it up."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
RESCUED = ".rescued"  # added to the name of a store that was deleted under a search

# Trying again helps against none of these.
_FINAL = re.compile(
    r"malformed|not a database|no such (table|column)|schema|permission denied|does not exist"
    r"|authentication failed|too long|driver is not installed|could not decode",
    re.IGNORECASE,
)
_READONLY = re.compile("readonly|read-only", re.IGNORECASE)
_OPERATIONS = (
    "create_new_study",
    "get_all_studies",
    "get_study_directions",
    "get_study_id_from_name",
    "get_study_name_from_id",
    "get_study_system_attrs",
    "get_study_user_attrs",
    "get_trial",
    "get_trial_id_from_study_id_trial_number",
    "set_study_system_attr",
    "set_study_user_attr",
    "set_trial_intermediate_value",
    "set_trial_system_attr",
    "set_trial_user_attr",
    "_get_trials",
    "_set_trial_param",
)

Result = TypeVar("Result")
OnTrouble = Callable[[str | None], None]
"""Told of trouble before each further try, and of its end by None; may raise to give up."""


class StoreError(OSError):
    """The store cannot be used, or not any more; one line."""


class PatientStorage(RDBStorage):
    """Optuna's storage in a database, that waits for trouble to pass if somebody is told of it.

    Args:
        url: An SQLAlchemy URL.
        place: The URL as it may be shown.
        path: The file of an SQLite database; None for others.
        explain: Gives the reason of an error of the database, in one line without passwords.
        on_trouble: See `OnTrouble`; None waits for nothing.
        engine_kwargs: SQLAlchemy's.
    """

    def __init__(
        self,
        url: str,
        *,
        place: str,
        path: Path | None,
        explain: Callable[[BaseException], str],
        on_trouble: OnTrouble | None,
        engine_kwargs: dict[str, Any],
    ) -> None:
        self._place = place
        self._path = path
        self._explain = explain
        self._on_trouble = on_trouble
        super().__init__(url, engine_kwargs=engine_kwargs)
        self._file = None if path is None else _identity(path)

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Set a trial's state; a try that succeeded without our hearing of it is not repeated."""
        tries = count()

        def once() -> bool:
            if next(tries) and RDBStorage.get_trial(self, trial_id).state == state:
                return True
            return RDBStorage.set_trial_state_values(self, trial_id, state, values)

        return self.patiently(once)

    def _create_new_trial(
        self, study_id: int, template_trial: FrozenTrial | None = None
    ) -> FrozenTrial:
        """Create a trial, once, even if a server was lost between doing it and saying so."""
        if self._path is not None:  # SQLite's failures are never successes
            return self.patiently(
                lambda: RDBStorage._create_new_trial(self, study_id, template_trial)
            )
        newest = self.patiently(lambda: self._newest_trial_id(study_id))
        tries = count()

        def once() -> FrozenTrial:
            now = self._newest_trial_id(study_id) if next(tries) else newest
            if now != newest:
                return RDBStorage.get_trial(self, now)
            return RDBStorage._create_new_trial(self, study_id, template_trial)

        return self.patiently(once)

    def _newest_trial_id(self, study_id: int) -> int:
        """Read the largest id of a study's trials, which grow; -1 without any."""
        with closing(self.scoped_session()) as session:
            newest = session.query(func.max(models.TrialModel.trial_id))
            found: int | None = newest.filter(models.TrialModel.study_id == study_id).scalar()
        return -1 if found is None else found

    def patiently(self, operation: Callable[[], Result]) -> Result:
        """Do an operation, again and again while trouble lasts that may pass.

        Args:
            operation: One transaction, that leaves nothing behind when it fails.

        Raises:
            StoreError: It does not pass, or nobody waits for it.
        """
        waited, pause, told = 0.0, FIRST_PAUSE_SECONDS, False
        while True:
            self._check_file()
            try:
                result = operation()
            except (StorageInternalError, SQLAlchemyError) as error:
                self._check_file()  # a deleted file has odd errors
                reason = self._explain(error)
                trouble = f"cannot use the storage {self._place}: {reason}"
                hopeless = waited >= PATIENCE_SECONDS or not _may_pass(error, reason)
                if self._on_trouble is None or hopeless:
                    raise StoreError(trouble) from error
                self._on_trouble(trouble)
                told = True
                time.sleep(pause)
                if _READONLY.search(reason):
                    self.engine.dispose()  # a file that SQLite opened to read stays so
                waited += pause
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                self._check_file()
                if told and self._on_trouble is not None:
                    self._on_trouble(None)
                return result

    def _check_file(self) -> None:
        """Refuse to write to a file that is no longer there: what is written would be lost.

        Raises:
            StoreError: It was moved, deleted or replaced; what it held is saved beside it.
        """
        path, known = self._path, getattr(self, "_file", None)
        if path is None or known is None:
            return
        with suppress(PermissionError):  # of a folder; SQLite then has its own trouble with it
            if _identity(path) == known:
                return
            self._give_up(path)

    def _give_up(self, path: Path) -> None:
        """Save what a file held that is no longer there, and say so.

        Raises:
            StoreError: Always.
        """
        saved = self._rescue(path)
        self._path = None  # said once; what follows is only the end of this process
        what = f"{path} was moved, deleted or replaced while it was in use"
        kept = "; what it held is lost" if saved is None else f"; what it held is in {saved}"
        raise StoreError(what + kept)

    def _rescue(self, path: Path) -> Path | None:
        """Copy the deleted file, which a connection still holds open, to a new one beside it."""
        names = (path.with_name(f"{path.name}{RESCUED}{n or ''}") for n in count())
        target = next(name for name in names if not name.exists())
        if not self.engine.pool.checkedin():  # type: ignore[attr-defined]
            return None  # a fresh connection would find another file, or none
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.engine.connect() as connection, closing(sqlite3.connect(target)) as copy:
                held: Any = connection.connection.driver_connection
                held.backup(copy)
        except (OSError, sqlite3.Error, SQLAlchemyError):
            target.unlink(missing_ok=True)
            return None
        return target


def _identity(path: Path) -> tuple[int, int] | None:
    """Tell a file from another one of the same name; None if there is none."""
    try:
        found = path.stat()
    except PermissionError:
        raise
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _may_pass(error: BaseException, reason: str) -> bool:
    """Whether another try may end differently."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    passing = isinstance(cause, (OperationalError, InterfaceError))
    return passing and _FINAL.search(reason) is None


def _patient(name: str) -> Callable[..., Any]:
    operation = getattr(RDBStorage, name)

    def patient(self: PatientStorage, *args: Any, **kwargs: Any) -> Any:
        return self.patiently(lambda: operation(self, *args, **kwargs))

    return patient


for _name in _OPERATIONS:
    setattr(PatientStorage, _name, _patient(_name))
