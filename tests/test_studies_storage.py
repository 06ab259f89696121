import socket
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.storages import RDBStorage

from studies.storage import (
    check_study_name,
    connect,
    mask,
    one_line_errors,
    sqlite_path,
    sqlite_url,
)


@pytest.mark.parametrize("name", ["a", "demo-160", "Llama 2 7B", "größe_層", "v1.2", "x" * 200])
def test_study_names_that_can_name_a_folder_are_taken(name, tmp_path):
    (tmp_path / check_study_name(name)).mkdir()


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "../x",
        "a\\b",
        "a\nb",
        "a\x00",
        "C:x",
        "a?",
        "x.",
        " x",
        "x ",
        "\u202eabc",
        "x" * 201,
    ],
)
def test_other_study_names_are_refused_in_one_line(name):
    with pytest.raises(ValueError, match="cannot name a folder") as caught:
        check_study_name(name)
    assert len(str(caught.value).splitlines()) == 1


@given(st.text(max_size=10))
def test_an_accepted_study_name_stays_in_its_root(name):
    try:
        check_study_name(name)
    except ValueError:
        return
    assert Path("root", name).resolve().parent == Path("root").resolve()


@pytest.mark.parametrize(
    "folder", ["plain", "with spaces", "größe 層", "50%20x", "a#b", "a&b=c@d:e"]
)
def test_sqlite_files_may_lie_in_any_folder(folder, tmp_path):
    path = tmp_path / folder / "deep" / "study.db"
    url = sqlite_url(path)
    assert sqlite_path(url) == path
    connect(url, create=True)
    assert path.exists()
    connect(url, create=False)


def test_a_question_mark_in_a_path_is_escaped_or_refused(tmp_path):
    path = tmp_path / "what?" / "study.db"
    try:
        url = sqlite_url(path)
    except ValueError as error:
        assert "cannot be written in a database URL" in str(error)
    else:
        assert sqlite_path(url) == path


def test_sqlite_waits_a_minute_for_a_lock(tmp_path):
    storage = connect(sqlite_url(tmp_path / "study.db"), create=True)
    assert storage.engine_kwargs["connect_args"] == {"timeout": 60}


def test_a_store_is_one_file(tmp_path):
    connect(sqlite_url(tmp_path / "study.db"), create=True)
    assert [file.name for file in tmp_path.iterdir()] == ["study.db"]


def test_a_file_that_a_killed_driver_left_empty_is_a_new_store(tmp_path):
    (tmp_path / "study.db").touch()
    connect(sqlite_url(tmp_path / "study.db"), create=False)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_a_store_in_memory_is_refused(url):
    with pytest.raises(ValueError, match="in memory is lost"):
        connect(url, create=True)


def test_a_missing_file_is_not_made_by_a_reader(tmp_path):
    path = tmp_path / "no" / "study.db"
    _refused(sqlite_url(path), "there is no such file", create=False)
    assert not path.parent.exists()


def test_text_is_no_database(tmp_path):
    path = tmp_path / "study.db"
    path.write_text("not a database, however long this text may be" * 100)
    _refused(sqlite_url(path), "file is not a database")


def test_a_folder_is_no_database(tmp_path):
    _refused(sqlite_url(tmp_path), "is a folder")


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    _refused(sqlite_url(tmp_path / "runs" / "x" / "study.db"), "runs")


def test_another_programs_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "study.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE photos (id INTEGER)")
    before = path.read_bytes()
    _refused(sqlite_url(path), "another program")
    assert path.read_bytes() == before


def test_a_truncated_database_is_refused(tmp_path):
    path = tmp_path / "study.db"
    connect(sqlite_url(path), create=True)
    whole = path.read_bytes()
    for size in range(4096, len(whole), 4096 * 5):
        path.write_bytes(whole[:size])
        _refused(sqlite_url(path), "malformed|damaged|another program")


def test_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / "study.db"
    connect(sqlite_url(path), create=True)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE alembic_version SET version_num = 'v99.0.0.a'")
    _refused(sqlite_url(path), "another version of Optuna")


def test_a_locked_database_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr("studies.storage.BUSY_SECONDS", 0)
    path = tmp_path / "study.db"
    connect(sqlite_url(path), create=True)
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        _refused(sqlite_url(path), "database is locked")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "is not a database URL"),
        ("runs/x/study.db", "is not a database URL"),
        ("nosuch://host/db", "Can't load plugin: sqlalchemy.dialects:nosuch"),
        ("redis://host", "Can't load plugin"),
        ("postgresql://me:s3cr3t@host:port/db", "is not a database URL"),
    ],
)
def test_urls_that_name_no_database_are_refused(url, message):
    with pytest.raises(ValueError, match=message) as caught:
        connect(url, create=True)
    assert "s3cr3t" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_server_that_cannot_be_reached_is_told_without_its_password():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        url = f"postgresql://me:s3cr3t@127.0.0.1:{port}/db"
        _refused(url, r"postgresql://me:\*\*\*@127.0.0.1.*(driver is not installed|refused)")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///runs/x/study.db", "sqlite:///runs/x/study.db"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql://me:s3cr3t@host/db", "postgresql://me:***@host/db"),
        ("mysql+pymysql://me:s3%40cr3t@host/db", "mysql+pymysql://me:***@host/db"),
        ("postgresql://host/db?user=me&password=s3cr3t", "***"),
        ("postgresql://me:s3cr3t@host:port/db", "://***@host:port/db"),
        ("odd://me:s3/cr3t@host:port", "://***@host:port"),
    ],
)
def test_passwords_are_masked(url, shown):
    assert shown in mask(url)
    assert "cr3t" not in mask(url)


def test_a_password_in_the_databases_own_words_is_masked():
    with (
        pytest.raises(ValueError, match=r"cannot log in with \*\*\*$"),
        one_line_errors("postgresql://me:s3cr3t@host/db"),
    ):
        raise OSError("cannot log in with s3cr3t\nmore of it")


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="a bug"), one_line_errors("sqlite:///x.db"):
        raise RuntimeError("a bug")


def _refused(url: str, message: str, *, create: bool = True) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        connect(url, create=create)
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith("cannot use the storage ")


def test_connect_gives_optunas_own_storage(tmp_path):
    assert isinstance(connect(sqlite_url(tmp_path / "study.db"), create=True), RDBStorage)
