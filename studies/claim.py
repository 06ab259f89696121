"""See to it that one process alone works on a study: a second one is told so and leaves.

A study in an SQLite file is claimed by the operating system's lock on a file beside it, which the
kernel releases with the process, whatever ends that. Elsewhere the claim is a lease in the study
itself, whose holder renews it. Nobody compares clocks: who finds a lease watches whether it is
renewed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

import optuna

from studies.patient import StoreError
from studies.storage import connect, sqlite_path

try:
    import fcntl
except ImportError:  # not a POSIX system: the lease serves there, too
    fcntl = None  # type: ignore[assignment]

LEASE_ATTR = "mola-search:driver"
BEAT_SECONDS = 10.0
LAPSE_SECONDS = 45.0  # a lease that was not renewed for so long is nobody's
SETTLE_SECONDS = 1.0  # after which two who claimed at the same moment see who was the last


class ClaimLostError(StoreError):
    """Another process has taken the study over; this one must write no more."""


class Claim:
    """A claim that is held."""

    def check(self) -> None:
        """Make sure that the claim still holds.

        Raises:
            ClaimLostError: It does not.
        """


@contextmanager
def claim(
    study: optuna.Study, url: str, say: Callable[[str], None] = lambda text: None
) -> Iterator[Claim]:
    """Hold a study while the context is open.

    It is not the forked child's to release, whatever becomes of the context there.

    Args:
        study: To be worked on.
        url: Of its storage.
        say: Told when another holder has to be watched, which takes a while.

    Raises:
        ValueError: Another process holds it; says which.
    """
    holder = os.getpid()
    path = sqlite_path(url)
    file = None if path is None or fcntl is None else _lock(path, study.study_name)
    if file is not None:
        try:
            yield Claim()
        finally:
            with file, suppress(OSError):  # where nobody may remove it, it can be locked again
                if os.getpid() == holder:
                    Path(file.name).unlink()  # still locked, so that no other has it
        return
    with _Lease(study, url).taken(say) as lease:
        yield lease


def _held(name: str, holder: dict[str, Any]) -> ValueError:
    """Say who holds a study."""
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'this machine')}"
    return ValueError(
        f"another search works on the study {name!r}: {who}, since {holder.get('began', '?')}; "
        "wait for it, stop it, or use another --study"
    )


def _me() -> dict[str, Any]:
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": platform.node(), "where": _where(), "pid": os.getpid(), "began": began}


def _where() -> str | None:
    """Name the set of processes in which a process id means something; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _lock(store: Path, name: str) -> TextIO | None:
    """Lock a file beside an SQLite database; it is there only while it is locked.

    Returns:
        The locked file; None if the file system knows no locks.

    Raises:
        ValueError: Another process has locked it.
    """
    short = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    store = store.resolve()  # whatever links lead to it
    path = store.with_name(f"{store.name}.{short}.lock")
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = {}
            with file, suppress(json.JSONDecodeError):  # it may not have been written yet
                file.seek(0)
                holder = json.load(file)
            raise _held(name, holder) from None
        except OSError:
            file.close()
            return None
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                break
        file.close()  # its last holder has removed it meanwhile
    file.truncate(0)
    file.write(json.dumps(_me()))
    file.flush()
    return file


class _Lease(Claim):
    """A claim that is written into the study, and renewed by a thread.

    Args:
        study: To be claimed.
        url: Of its storage, to which the thread has a connection of its own.
    """

    def __init__(self, study: optuna.Study, url: str) -> None:
        self._name, self._study_id = study.study_name, study._study_id
        self._storage = connect(url, create=False)
        self._mine = {**_me(), "token": uuid4().hex}
        self._beats = 0
        self._renewed = time.monotonic()
        self._lost = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._guard = threading.Lock()

    @contextmanager
    def taken(self, say: Callable[[str], None]) -> Iterator[_Lease]:
        """Hold the lease while the context is open; see `claim`."""
        try:
            self._take(say)
            self._thread.start()
            try:
                yield self
            finally:
                if self._is_mine():
                    self._release()
        finally:
            self._storage.engine.dispose(close=self._is_mine())

    def _is_mine(self) -> bool:
        """Whether this is the process that took the lease, rather than a child forked from it."""
        return bool(self._mine["pid"] == os.getpid())

    def _release(self) -> None:
        self._over.set()
        self._thread.join()
        if not self._lost:
            with suppress(StoreError):  # it lapses
                self._storage.set_study_system_attr(self._study_id, LEASE_ATTR, None)

    def _take(self, say: Callable[[str], None]) -> None:
        """Write the lease, unless another one is being renewed.

        Raises:
            ValueError: Another process holds the study.
        """
        found = self._read()
        if found is not None and not _is_dead(found):
            say(
                f"the study was left by process {found.get('pid')} on {found.get('host')}, or is "
                f"at work there: watching it for {LAPSE_SECONDS:.0f} s"
            )
            deadline = time.monotonic() + LAPSE_SECONDS
            while time.monotonic() < deadline:
                time.sleep(BEAT_SECONDS / 4)
                now = self._read()
                if now != found:
                    raise _held(self._name, now or found)
        self._write()
        time.sleep(SETTLE_SECONDS)
        now = self._read()
        if now is None or now["token"] != self._mine["token"]:
            raise _held(self._name, now or {})

    def check(self) -> None:
        """Make sure that nobody has taken the study over, as after a long sleep of this process.

        Raises:
            ClaimLostError: Somebody has.
        """
        if not self._lost and time.monotonic() - self._renewed > LAPSE_SECONDS:
            with suppress(StoreError):  # the store is out of reach for all
                self._beat()
        if self._lost:
            raise ClaimLostError(
                f"another search has taken over the study {self._name!r}, as this one was not "
                f"heard of for {LAPSE_SECONDS:.0f} s"
            )

    def _renew(self) -> None:
        while not self._over.wait(BEAT_SECONDS) and not self._lost:
            with suppress(StoreError):  # while the server is away, nobody can take the study
                self._beat()
            self._storage.remove_session()

    def _beat(self) -> None:
        with self._guard:
            if (self._read() or {}).get("token") != self._mine["token"]:
                self._lost = True
                return
            self._write()
            self._renewed = time.monotonic()

    def _read(self) -> dict[str, Any] | None:
        attrs = self._storage.get_study_system_attrs(self._study_id)
        found: dict[str, Any] | None = attrs.get(LEASE_ATTR)
        return found

    def _write(self) -> None:
        self._beats += 1
        lease = {**self._mine, "beats": self._beats}
        self._storage.set_study_system_attr(self._study_id, LEASE_ATTR, lease)


def _is_dead(lease: dict[str, Any]) -> bool:
    """Whether a lease is that of a process of this machine which is no more."""
    where = _where()
    if where is None or lease.get("where") != where:
        return False
    try:
        os.kill(int(lease["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, KeyError, ValueError):
        return False
    return False
