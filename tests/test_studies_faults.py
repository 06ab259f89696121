"""Stores that are locked, full, cut short, deleted or taken by another process, for real."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from pretend_pool import no_waiting_for_the_disk
from sqlalchemy.exc import OperationalError

import studies.claim
import studies.patient
import studies.storage
from studies.claim import ClaimLostError, claim
from studies.patient import PatientStorage, StoreError
from studies.storage import connect, sqlite_url

__all__ = ["no_waiting_for_the_disk"]
pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk", "no_pauses")
FOLDER = "größe 層 with spaces"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies.patient, "FIRST_PAUSE_SECONDS", 0)
    monkeypatch.setattr(studies.storage, "PATIENT_BUSY_SECONDS", 0)


class Trouble:
    """Hear of trouble, and mend it at the third time."""

    def __init__(self) -> None:
        self.heard: list[str | None] = []
        self.mend = lambda: None

    def __call__(self, trouble: str | None) -> None:
        self.heard.append(trouble)
        if len(self.heard) == 3:
            self.mend()


@pytest.fixture
def trouble() -> Trouble:
    return Trouble()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FOLDER / "study.db"


@pytest.fixture
def study(path: Path, trouble: Trouble) -> optuna.Study:
    return made(path, trouble)


def made(path: Path, trouble: Trouble | None = None) -> optuna.Study:
    storage = connect(sqlite_url(path), create=True, on_trouble=trouble)
    study = optuna.create_study(study_name="größe", storage=storage, load_if_exists=True)
    study.set_user_attr("before", 1)
    return study


def attrs_of(path: Path) -> dict[str, object]:
    study = optuna.load_study(study_name="größe", storage=connect(sqlite_url(path), create=False))
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    return study.user_attrs


def test_a_lock_is_waited_for(study: optuna.Study, path: Path, trouble: Trouble) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM studies").fetchall()  # a reader alone keeps a writer out
        trouble.mend = lambda: reader.execute("COMMIT")
        study.set_user_attr("after", 2)
    assert all("database is locked" in str(said) for said in trouble.heard[:3])
    assert trouble.heard[3:] == [None]
    assert attrs_of(path) == {"before": 1, "after": 2}


def test_a_full_disk_is_waited_for(tmp_path: Path, trouble: Trouble) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs to be root")
    try:
        path, filler = tmp_path / "study.db", tmp_path / "filler"
        study = made(path, trouble)
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        trouble.mend = filler.unlink
        study.set_user_attr("after", "x" * 2000)
        assert "database or disk is full" in str(trouble.heard[0])
        assert trouble.heard[-1] is None
        assert attrs_of(path) == {"before": 1, "after": "x" * 2000}
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_store_that_is_read_only_for_a_while_is_waited_for(
    path: Path, study: optuna.Study, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_ = sqlite3.connect

    def read_only(name: str, **options: Any) -> sqlite3.Connection:
        return connect_(f"file:{quote(str(path))}?mode=ro", uri=True, **options)

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3.dbapi2, "connect", read_only)
        study._storage._backend.engine.dispose()
        trouble.mend = patched.undo
        study.set_user_attr("after", 2)
    assert all("attempt to write a readonly database" in str(said) for said in trouble.heard[:3])
    assert trouble.heard[3:] == [None]
    assert attrs_of(path) == {"before": 1, "after": 2}


def test_a_store_that_is_read_only_from_the_start_is_refused(
    path: Path, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path)
    forbidden = path
    # As root, file modes stop nobody.
    monkeypatch.setattr(os, "access", lambda name, mode: name != forbidden or not mode & os.W_OK)
    with pytest.raises(ValueError, match="cannot use the storage .*you may not write to it"):
        made(path, trouble)
    forbidden = path.parent
    with pytest.raises(ValueError, match="cannot use the storage .*you may not write to its fol"):
        made(path, trouble)
    assert trouble.heard == []


def test_trouble_that_nobody_waits_for_is_an_error_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies.storage, "BUSY_SECONDS", 0)
    study = made(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="database is locked") as caught:
            study.set_user_attr("after", 2)
    assert len(str(caught.value).splitlines()) == 1
    assert attrs_of(path) == {"before": 1}


def test_patience_ends(
    study: optuna.Study, path: Path, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies.patient, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(studies.patient, "PATIENCE_SECONDS", 0.005)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="database is locked"):
            study.set_user_attr("after", 2)
    assert len(trouble.heard) == 3  # 1 ms, 2 ms, 4 ms


def test_the_listener_may_give_up(study: optuna.Study, path: Path, trouble: Trouble) -> None:
    def give_up() -> None:
        raise KeyboardInterrupt

    trouble.mend = give_up
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(KeyboardInterrupt):
            study.set_user_attr("after", 2)
    study.set_user_attr("after", 3)
    assert attrs_of(path) == {"before": 1, "after": 3}


@pytest.mark.parametrize("how", ["file", "folder", "replaced"])
def test_what_a_deleted_store_held_is_saved(study: optuna.Study, path: Path, how: str) -> None:
    study.enqueue_trial({"x": 1})
    if how == "file":
        path.unlink()
    elif how == "folder":
        shutil.rmtree(path.parent)
    else:
        made(path.with_name("other.db"))
        path.with_name("other.db").rename(path)
    with pytest.raises(StoreError, match="was moved, deleted or replaced") as caught:
        study.set_user_attr("after", 2)
    saved = path.with_name("study.db.rescued")
    assert str(caught.value).endswith(f"what it held is in {saved}")
    assert attrs_of(saved) == {"before": 1}
    rescued = optuna.load_study(study_name="größe", storage=sqlite_url(saved))
    assert [trial.state for trial in rescued.trials] == [TrialState.WAITING]


def test_a_store_cut_short_while_it_is_used_is_an_error(
    study: optuna.Study, path: Path, trouble: Trouble
) -> None:
    os.truncate(path, 4096)
    with pytest.raises(StoreError, match="malformed|no such table"):
        study.set_user_attr("after", 2)
    assert trouble.heard == []


def test_a_journal_is_no_database_whole_or_torn(tmp_path: Path) -> None:
    """Optuna's journals are not supported: a torn last line makes them unreadable for ever."""
    from optuna.storages.journal import JournalFileBackend

    path = tmp_path / "study.log"
    backend = JournalFileBackend(str(path))
    backend.append_logs([{"op_code": 0, "worker_id": "a" * 200, "study_name": "s"}] * 3)
    for text in (path.read_text(), path.read_text()[:-40]):
        path.write_text(text)
        with pytest.raises(ValueError, match="file is not a database") as caught:
            connect(sqlite_url(path), create=False)
        assert len(str(caught.value).splitlines()) == 1
        assert path.read_text() == text


@pytest.fixture
def deaf(tmp_path: Path) -> optuna.Study:
    """A study on a server, as far as the storage knows, where a failure may be a success."""
    storage = PatientStorage(
        f"sqlite:///{tmp_path}/study.db",
        place="server",
        path=None,
        explain=str,
        on_trouble=lambda trouble: None,
        engine_kwargs={},
    )
    return optuna.create_study(storage=storage)


def lose_one_answer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the server do what it is told next, and be gone before it has said so."""
    operation, left = getattr(RDBStorage, name), [1]

    def deafly(*args: object, **kwargs: object) -> object:
        result = operation(*args, **kwargs)
        if left.pop() if left else 0:
            lost = OperationalError("COMMIT", {}, Exception("server closed the connection"))
            raise StorageInternalError("lost") from lost
        return result

    monkeypatch.setattr(RDBStorage, name, deafly)


def test_a_trial_is_made_once_although_the_answer_was_lost(
    deaf: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf.enqueue_trial({"x": 1})
    lose_one_answer(monkeypatch, "_create_new_trial")
    deaf.enqueue_trial({"x": 2})
    assert [t.system_attrs["fixed_params"]["x"] for t in deaf.get_trials()] == [1, 2]
    assert deaf.get_trials()[1].number == 1


def test_a_trial_is_taken_and_ended_once_although_the_answer_was_lost(
    deaf: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf.enqueue_trial({"x": 1})
    lose_one_answer(monkeypatch, "set_trial_state_values")
    assert deaf.ask().number == 0
    lose_one_answer(monkeypatch, "set_trial_state_values")
    deaf.tell(0, 1.5)
    assert [(t.state, t.value) for t in deaf.get_trials()] == [(TrialState.COMPLETE, 1.5)]


HOLD = """
import sys, optuna
from studies.claim import claim
with claim(optuna.load_study(study_name="größe", storage=sys.argv[1]), sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(study: optuna.Study, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the study."""
    root = str(Path(studies.claim.__file__).parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, sqlite_url(path)],
        env={**os.environ, "PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.timeout(60)
def test_a_study_is_one_processs_until_the_kernel_says_otherwise(
    study: optuna.Study, path: Path, holder: subprocess.Popen[str]
) -> None:
    (lock,) = (p for p in path.parent.iterdir() if p.suffix == ".lock")
    assert json.loads(lock.read_text())["pid"] == holder.pid
    with (
        pytest.raises(ValueError, match=f"another search .* 'größe': process {holder.pid} on "),
        claim(study, sqlite_url(path)),
    ):
        pass
    other = optuna.create_study(study_name="other", storage=study._storage)
    with claim(other, sqlite_url(path)):
        pass  # another study of the same file is free
    holder.kill()
    holder.wait()
    with claim(study, sqlite_url(path)) as held:
        held.check()
    assert [p.name for p in path.parent.iterdir()] == ["study.db"]


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """No locks of the operating system, and leases that are short."""
    monkeypatch.setattr(studies.claim, "fcntl", None)
    monkeypatch.setattr(studies.claim, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(studies.claim, "LAPSE_SECONDS", 1.0)
    monkeypatch.setattr(studies.claim, "SETTLE_SECONDS", 0)


@pytest.mark.usefixtures("leases")
def test_a_lease_that_is_renewed_is_respected_and_one_that_is_not_lapses(
    study: optuna.Study, path: Path
) -> None:
    said: list[str] = []
    url = sqlite_url(path)
    with claim(study, url) as first:
        with pytest.raises(ValueError, match="another search works on"), claim(study, url):
            pass
        first.check()
    left = {"host": "elsewhere", "pid": 7, "token": "t", "beats": 3}
    study._storage.set_study_system_attr(study._study_id, studies.claim.LEASE_ATTR, left)
    with claim(study, url, said.append) as taken:
        taken.check()
    assert "process 7 on elsewhere" in said[0]
    assert study._storage.get_study_system_attrs(study._study_id)[studies.claim.LEASE_ATTR] is None


@pytest.mark.usefixtures("leases")
def test_the_lease_of_a_dead_process_of_this_machine_is_taken_at_once(
    study: optuna.Study, path: Path
) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    left = {**studies.claim._me(), "pid": dead.pid, "token": "t", "beats": 3}
    study._storage.set_study_system_attr(study._study_id, studies.claim.LEASE_ATTR, left)
    said: list[str] = []
    with claim(study, sqlite_url(path), said.append):
        pass
    assert said == []


@pytest.mark.usefixtures("leases")
def test_who_was_away_for_too_long_learns_that_the_study_is_taken(
    study: optuna.Study, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies.claim, "BEAT_SECONDS", 1000)
    monkeypatch.setattr(studies.claim, "LAPSE_SECONDS", -1)  # it was away ever since
    with claim(study, sqlite_url(path)) as first:
        first.check()
        theirs = {"host": "elsewhere", "pid": 7, "token": "t", "beats": 1}
        study._storage.set_study_system_attr(study._study_id, studies.claim.LEASE_ATTR, theirs)
        with pytest.raises(ClaimLostError, match="another search has taken over"):
            first.check()
    attrs = study._storage.get_study_system_attrs(study._study_id)
    assert attrs[studies.claim.LEASE_ATTR] == theirs


def test_where_files_cannot_be_locked_there_are_leases(
    study: optuna.Study, path: Path, leases: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(studies.claim, "fcntl", fcntl)
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with claim(study, sqlite_url(path)):
        attrs = study._storage.get_study_system_attrs(study._study_id)
        assert attrs[studies.claim.LEASE_ATTR]["pid"] == os.getpid()
