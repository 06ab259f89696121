"""The search command as processes that only pretend to train, to be stopped, killed and cut off.

What takes long is imported once, by a process that then forks one for each search.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna

from studies.records import REPLICATE, SPEC_ATTR, TrialRecord, records

TRIALS = 7
ARGUMENTS = (
    *("--study", "mine", "--budget", "12", "--steps", "4", "--finalists", "1"),
    *("--trials", str(TRIALS), "--confirm-seeds", "0"),
)


@dataclass
class Search:
    """A search that runs.

    Attributes:
        pid: Of its process, which leads a session.
    """

    pid: int
    _nursery: Nursery

    def wait(self) -> int:
        """Give its exit status; minus the signal that killed it."""
        return int(self._nursery.ask({"wait": self.pid}))

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        os.kill(self.pid, number)


class Nursery:
    """The process that forks searches."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        root = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"},
        )
        theirs.close()

    def start(
        self,
        folder: Path,
        *arguments: str,
        pace: float = 0.0,
        die_at: int = 0,
        modest: bool = False,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> Search:
        """Start a search in a folder.

        Args:
            folder: Its own; what it prints is added to out.txt and err.txt there.
            arguments: More options of the command.
            pace: Seconds that each poll of the pool takes.
            die_at: Number of the statement or commit before which it kills itself; 0: none.
            modest: Whether file modes bind it, even if it is root.
            stdin: In place of an empty file.
            stdout: In place of out.txt.
            stderr: In place of err.txt.
        """
        with (folder / "out.txt").open("ab") as out, (folder / "err.txt").open("ab") as err:
            files = [
                os.open(os.devnull, os.O_RDONLY) if stdin is None else os.dup(stdin),
                os.dup(out.fileno() if stdout is None else stdout),
                os.dup(err.fileno() if stderr is None else stderr),
            ]
        request = {"start": [*ARGUMENTS, *arguments], "folder": str(folder)}
        request |= {"pace": pace, "die_at": die_at, "modest": modest}
        pid = self.ask(request, files)
        for file in files:
            os.close(file)
        return Search(int(pid), self)

    def ask(self, request: dict[str, Any], files: list[int] | None = None) -> str:
        socket.send_fds(self._socket, [json.dumps(request).encode()], files or [])
        answer = self._socket.recv(100)
        assert answer, "the nursery has died"
        return answer.decode()

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@contextmanager
def nursery() -> Iterator[Nursery]:
    """Keep a process that forks searches."""
    kept = Nursery()
    try:
        yield kept
    finally:
        kept.close()


def wait_for(path: Path, text: str, seconds: float = 60) -> None:
    """Wait until a process has written a text to a file."""
    deadline = time.monotonic() + seconds
    while text not in (path.read_text(errors="replace") if path.exists() else ""):
        assert time.monotonic() < deadline, f"{text!r} is not in {path.read_text()!r}"
        time.sleep(0.005)


def study_of(folder: Path) -> list[TrialRecord]:
    """Read the trials of a search that was started in a folder; none before there is a study."""
    path = folder / "runs/mine/study.db"
    if not path.exists() or path.stat().st_size == 0:
        return []
    try:
        study = optuna.load_study(study_name="mine", storage=f"sqlite:///{path}")
    except KeyError:
        return []
    return records(study) if SPEC_ATTR in study.user_attrs else []


def check_finished(
    folder: Path, finished: Sequence[TrialRecord] = (), *, fresh_seeds: int = 0
) -> None:
    """Check that a search did all that it should, each once, and kept what was finished before.

    Args:
        folder: Where it was started.
        finished: Trials that must be there as they were.
        fresh_seeds: Number of seeds of the confirmation.
    """
    trials = study_of(folder)
    kept = {trial.number: trial for trial in trials}
    assert [kept[trial.number] for trial in finished] == list(finished)
    done = [trial for trial in trials if trial.state == "COMPLETE"]
    assert set(Counter((t.allocation, t.seed) for t in done).values()) == {1}, "one ran twice"
    assert not [t for t in trials if t.state in ("RUNNING", "WAITING")]
    assert sum(t.label != REPLICATE for t in done) == TRIALS
    named = [t.label for t in done if t.label.startswith("named")]
    assert len(named) == len(set(named)) == 5
    assert bool(fresh_seeds) == any(t.label == REPLICATE for t in done)
    confirmed = [t for t in done if t.label == REPLICATE]
    assert len(confirmed) == fresh_seeds * len({t.allocation for t in confirmed})
    check_whole(folder / "runs/mine/study.db")


def check_whole(path: Path) -> None:
    """Check that an SQLite database is in order."""
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def _serve(requests: socket.socket) -> None:
    """Answer requests until there are no more."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, 65536, 3)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            status = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            requests.send(str(status).encode())
            continue
        pid = os.fork()
        if pid == 0:
            requests.close()
            os._exit(_become(request, files))
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())


def _become(request: dict[str, Any], files: list[int]) -> int:
    """Turn a fresh process into a search; give its exit status."""
    import search.run

    os.setsid()
    if os.isatty(files[0]):  # a terminal of its own, whose end is a signal to it
        import fcntl
        import termios

        fcntl.ioctl(files[0], termios.TIOCSCTTY, 0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    _pretend(request["pace"])
    _die_at(request["die_at"])
    if request["modest"]:
        _be_modest()
    try:
        search.run.main(request["start"])
    except SystemExit as end:
        sys.stdout.flush()
        return int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 99
    return 98


def _pretend(pace: float) -> None:
    """Put what only pretends in the place of model, data, workers and reports."""
    from pretend_pool import PretendPool
    from test_search_driver import SPEC

    import search.job
    import search.plan
    import search.report.dashboard
    import search.run

    class Paced(PretendPool):
        def poll(self, timeout_seconds: float) -> list[Any]:
            time.sleep(pace)  # the training
            return super().poll(timeout_seconds)

    def prepare(settings: search.plan.Settings) -> search.plan.Plan:
        return search.plan.Plan(replace(settings, rungs=(2,)), SPEC, None, ())  # type: ignore[arg-type]

    search.run.prepare = prepare
    search.run.with_demo_defaults = lambda settings, given: settings
    search.job._begin = lambda *_: Paced()  # type: ignore[assignment]
    search.job._write_files = lambda *_: None  # type: ignore[assignment]
    search.report.dashboard.refresh = lambda *_: None
    search.job.settle_priors = lambda *_: ()  # type: ignore[assignment]


def _be_modest() -> None:
    """Give up all capabilities, among them that of root to ignore the modes of files."""
    import ctypes

    version_3_of_ourselves = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    if os.geteuid() == 0 and ctypes.CDLL(None).capset(version_3_of_ourselves, none) != 0:
        raise OSError("capabilities cannot be given up")


def _relax() -> None:
    """Leave out the sync after each transaction: only a loss of power would make a difference."""
    from sqlalchemy import Engine, event

    def relax(connection: Any, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", relax)


def _die_at(number: int) -> None:
    """Kill this process before so many statements and commits have reached the database."""
    from sqlalchemy import Engine, event

    left = [number]

    def count(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if number:
        event.listen(Engine, "before_cursor_execute", count)
        event.listen(Engine, "commit", count)


if __name__ == "__main__":
    import test_search_driver  # noqa: F401

    import search.console.display
    import search.console.results
    import search.driver
    import search.job
    import search.pruner
    import search.report.dashboard
    import search.run
    import search.sampler

    signal.signal(signal.SIGINT, signal.default_int_handler)
    _relax()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)
