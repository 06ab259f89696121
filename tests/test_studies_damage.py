"""Files of databases whose pages were damaged: refused, or an error, and never read as others."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from pretend_pool import no_waiting_for_the_disk
from pretend_study import SEARCHED, empty_study, run_one

import studies.storage
from studies import store
from studies.patient import StoreError
from studies.storage import connect, sqlite_url
from studies.trial_storage import TrialStorage

__all__ = ["no_waiting_for_the_disk"]
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # SQLAlchemy's pool at the end
PAGE = 4096
LEAVES = {13: "table", 10: "index"}  # SQLite's types of pages without children


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[bytes]:
    """The file of a study with results."""
    path = tmp_path_factory.mktemp("whole") / "study.db"
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = empty_study(storage=TrialStorage(connect(sqlite_url(path), create=True)))  # type: ignore[arg-type]
    for number, allocation in enumerate(SEARCHED):
        run_one(study, allocation, end="prune" if number == 3 else "complete")
    yield path.read_bytes()


@pytest.fixture
def path(tmp_path: Path, whole: bytes) -> Path:
    path = tmp_path / "study.db"
    path.write_bytes(whole)
    return path


def roots(path: Path) -> dict[str, int]:
    """Where the first pages of tables and indexes are, by name."""
    with closing(sqlite3.connect(path)) as database:
        found = database.execute("SELECT name, rootpage FROM sqlite_master WHERE rootpage > 0")
        return {name: (number - 1) * PAGE for name, number in found}


def emptied(page: bytes) -> bytes:
    """Write a page as SQLite writes one that has no rows, in which there is no error."""
    return page[:3] + bytes(2) + PAGE.to_bytes(2, "big") + page[7:]


def read(path: Path) -> list[store.TrialRecord]:
    return store.records(store.load_study("mine", sqlite_url(path)))


def read_or_refused(path: Path) -> list[store.TrialRecord] | None:
    try:
        return read(path)
    except (ValueError, StoreError) as error:
        assert len(str(error).splitlines()) == 1
        return None


def test_a_damaged_page_is_refused(path: Path, whole: bytes) -> None:
    right, refused = read(path), 0
    for name, start in roots(path).items():
        page = whole[start : start + PAGE]
        for damaged in (bytes(PAGE), emptied(page) if page[0] in LEAVES else bytes(PAGE)):
            path.write_bytes(whole[:start] + damaged + whole[start + PAGE :])
            found = read_or_refused(path)
            assert found in (None, right), name
            refused += found is None
    assert refused > 30


def test_what_the_check_of_a_large_file_leaves_out_is_an_error_where_it_is_read(
    path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies.storage, "_LARGE", 0)
    right, where = read(path), roots(path)
    assert len(right) == 4
    for name in ("trials", "trial_values", "trial_user_attributes", "trial_system_attributes"):
        for place in (name, *(index for index in where if f"_{name}_" in index)):
            start = where[place]
            page = whole[start : start + PAGE]
            for damaged in (bytes(PAGE), emptied(page) if page[0] in LEAVES else bytes(PAGE)):
                path.write_bytes(whole[:start] + damaged + whole[start + PAGE :])
                found = read_or_refused(path)
                # What the attributes of the system hold stands in another table, too.
                assert found is None or (found == right and "system" in place), place


def test_who_writes_checks_a_large_file_as_a_whole(
    path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies.storage, "_LARGE", 0)
    start = roots(path)["trial_heartbeats"]  # which nothing here reads
    path.write_bytes(whole[:start] + bytes(PAGE) + whole[start + PAGE :])
    assert read(path)
    for told in ({"create": True}, {"create": False, "on_trouble": lambda trouble: None}):
        with pytest.raises(ValueError, match="damaged|malformed") as caught:
            connect(sqlite_url(path), **told)  # type: ignore[arg-type]
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE trials SET state = 'COMPLETELY' WHERE number = 1",
        "UPDATE trials SET datetime_start = 'soon' WHERE number = 1",
        "UPDATE trial_intermediate_values SET intermediate_value_type = 'BINITE'",
        "UPDATE trial_values SET value = NULL",
        "UPDATE trial_values SET value = 'much'",
        "UPDATE trial_system_attributes SET value_json = '{\"experts\":[1]}'",
        "UPDATE trial_system_attributes SET value_json = '[]'",
        "UPDATE trial_user_attributes SET value_json = '{'",
        "UPDATE trial_user_attributes SET key = CAST(x'ff' AS TEXT) WHERE key = 'seed'",
        "DELETE FROM trial_system_attributes",  # of whole trials
        "DELETE FROM trial_values",
    ],
)
def test_a_row_that_nobody_writes_is_an_error_of_one_line(path: Path, change: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM trial_params")  # an older copy of the parameters
        database.execute(change)
        database.commit()
    assert read_or_refused(path) is None
