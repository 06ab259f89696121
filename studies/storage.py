"""Reach Optuna storages: their addresses, how they are opened, what goes wrong in one line."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from optuna.exceptions import StorageInternalError
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from studies.patient import OnTrouble, PatientStorage, StoreError

STORE_FILE = "study.db"
BUSY_SECONDS = 60  # how long SQLite waits for a lock that another process holds
PATIENT_BUSY_SECONDS = 5  # the same where trouble is waited for, in a way that Ctrl-C can end
_LARGE = 2**29  # bytes of a file from which on a reader checks one table: all would take seconds
CONNECT_SECONDS = 10  # how long a database server may take to answer
_SECRET = re.compile(r"pass|pwd|secret|token|key", re.IGNORECASE)
_SECRET_ARGUMENT = re.compile(rf"([?&][^=&]*(?:{_SECRET.pattern})[^=&]*=)[^&]*", re.IGNORECASE)
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f<>:"/\\|?*]')


def check_study_name(name: str) -> str:
    r"""Return a study's name if it can be the name of a folder on any system.

    Raises:
        ValueError: It is empty, too long, starts with a dot, starts or ends with a space, ends
            with a dot, or contains a control character or one of `<>:"/\|?*`.
    """
    odd = _FORBIDDEN.search(name)
    if not name or len(name.encode(errors="replace")) > 200:
        reason = "it must have 1 to 200 bytes"
    elif odd:
        reason = f"it must not contain {odd[0]!r}"
    elif name.startswith((".", " ")) or name.endswith((".", " ")) or not name.isprintable():
        reason = "it must be printable, and not start or end with a dot or a space"
    else:
        return name
    raise ValueError(f"the study name {name!r:.100} cannot name a folder: {reason}")


def sqlite_url(path: Path) -> str:
    """Write a file's path as an SQLite URL, readable where it needs no escapes.

    Raises:
        ValueError: The path has a "?", which SQLAlchemy before 2.1 cannot write.
    """
    escaped = URL.create("sqlite", database=str(path)).render_as_string()
    for url in (f"sqlite:///{path}", escaped):
        if make_url(url).database == str(path):
            return url
    raise ValueError(f"the folder {str(path.parent)!r} cannot be written in a database URL")


def sqlite_path(url: str) -> Path | None:
    """Return the file of an SQLite URL; None for other databases and for SQLite's own URIs.

    Raises:
        ValueError: The URL is not one, or is that of an SQLite database in memory.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() != "sqlite" or str(parsed.database).startswith("file:"):
        return None
    if parsed.database in (None, "", ":memory:"):
        raise ValueError(
            f"--storage {mask(url)}: a study in memory is lost with the process; "
            "give a file, as in sqlite:///runs/mine.db"
        )
    return Path(str(parsed.database))


def mask(url: str) -> str:
    """Replace every password in a storage URL by `***`, in one that is mistyped, too."""
    url = _SECRET_ARGUMENT.sub(r"\1***", url)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        parsed = None
    if parsed is None or "@" in str(parsed.host):  # that of an unescaped password
        return re.sub(r":(/*).*@", r":\1***@", url, flags=re.DOTALL)
    return parsed.render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


def connect(url: str, *, create: bool, on_trouble: OnTrouble | None = None) -> PatientStorage:
    """Open a storage.

    SQLite keeps its rollback journal rather than a write-ahead log: a study is then one file that
    can be copied, mailed, kept read-only or on a network drive. With one writer whose transactions
    take milliseconds, readers such as the dashboard hardly wait for it, nor it for them.

    Args:
        url: An SQLAlchemy URL.
        create: Whether an SQLite file that is missing is made, with the folders above it.
        on_trouble: Told of trouble that may pass, which is then waited for; see `PatientStorage`.
            None: every trouble is an error at once.

    Raises:
        ValueError: One line that says what is wrong; passwords are masked.
    """
    path = sqlite_path(url)
    with one_line_errors(url):
        options: dict[str, Any]
        if path is not None:
            writes = create or on_trouble is not None
            _check_file(path, create, whole=writes)
            if on_trouble is not None:
                _check_writable(path)
            seconds = BUSY_SECONDS if on_trouble is None else PATIENT_BUSY_SECONDS
            options = {"connect_args": {"timeout": seconds}}
        else:
            # These drivers all know the argument; another one brings its own default.
            known = re.search(r"psycopg|mysql", _parse(url).get_dialect().driver)
            arguments = {"connect_timeout": CONNECT_SECONDS} if known else {}
            options = {"connect_args": arguments, "pool_pre_ping": True}
        return PatientStorage(
            url,
            place=mask(url),
            path=path,
            explain=lambda error: _reason(error, url),
            on_trouble=on_trouble,
            engine_kwargs=options,
        )


@contextmanager
def one_line_errors(url: str) -> Iterator[None]:
    """Turn what a storage raises into a ValueError of one line without passwords.

    Raises:
        ValueError: In place of any error of the database or the file system.
    """
    try:
        yield
    except StoreError as error:
        raise ValueError(str(error)) from error
    except (SQLAlchemyError, StorageInternalError, sqlite3.Error, ImportError, OSError) as error:
        reason = _reason(error, url)
    except RuntimeError as error:
        if "schema" not in str(error):
            raise
        reason = (
            "it was written by another version of Optuna; install that version, or try "
            "`optuna storage upgrade --storage URL`"
        )
    else:
        return
    raise ValueError(f"cannot use the storage {mask(url)}: {reason}")


def _parse(url: str) -> URL:
    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        raise ValueError(
            f"--storage {mask(url)!r} is not a database URL; "
            "write one like sqlite:///runs/mine.db or postgresql://user@host/database"
        ) from None


def _check_file(path: Path, create: bool, *, whole: bool) -> None:
    """Refuse a file that Optuna would not, or not clearly: another program's, or a damaged one.

    Args:
        path: Of the database.
        create: Whether it may be missing.
        whole: Whether all of it is checked, however large it is.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the file in it")
    if not path.exists():
        if not create:
            raise FileNotFoundError("there is no such file")
        path.parent.mkdir(parents=True, exist_ok=True)
        return
    if not os.access(path, os.R_OK):
        raise PermissionError("you may not read it")
    if path.stat().st_size == 0:  # a driver was killed before its first write
        return
    # Read and write, since only that can take back the transaction of a killed driver.
    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as database:
        tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
        if tables and not {"studies", "version_info"} <= tables:
            raise sqlite3.DatabaseError("it is the database of another program, not of Optuna")
        scope = "1" if whole or path.stat().st_size < _LARGE else "trials"
        # The quick check passes over indexes, and what they lack would be read as if it were not.
        (verdict,) = database.execute(f"PRAGMA integrity_check({scope})").fetchone()
        if verdict != "ok":
            text = " ".join(verdict.split())
            raise sqlite3.DatabaseError(f"it is damaged ({text}); bring back a copy of it")


def _check_writable(path: Path) -> None:
    """Refuse at once what is waited for where it happens later."""
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError("you may not write to it, or its file system is read-only")
    if not os.access(path.resolve().parent, os.W_OK):  # whatever links lead to it
        raise PermissionError("you may not write to its folder, where SQLite needs a journal")


def _reason(error: BaseException, url: str) -> str:
    """Find the database's own words, on one line and without the password."""
    while isinstance(error, (StorageInternalError, ImportError)) and error.__cause__ is not None:
        error = error.__cause__
    original = getattr(error, "orig", None) or error
    if isinstance(original, ImportError):
        return f"the database driver is not installed ({original})"
    if isinstance(original, OSError) and original.strerror:
        original = original.strerror
    lines = str(original).strip().splitlines() or [type(original).__name__]
    text = lines[0].strip()
    for secret in _secrets(url):
        text = text.replace(secret, "***")
    return text


def _secrets(url: str) -> list[str]:
    """List the passwords of a URL, as they are and as they are written in it, longest first."""
    parsed = _parse(url)
    values = [parsed.password, *(v for k, v in parsed.query.items() if _SECRET.search(k))]
    if "@" in str(parsed.host):  # an unescaped one is read as a part of the host
        values += [str(parsed.host).rsplit("@", 1)[0]]
    found = {str(part) for v in values for part in (v if isinstance(v, tuple) else (v,)) if part}
    return sorted(found | {quote(text, safe="") for text in found}, key=len, reverse=True)
