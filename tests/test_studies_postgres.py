"""A study on a real PostgreSQL server, which goes away in the middle of a search."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
from pretend_pool import PretendPool
from test_search_driver import RULES, SPEC, drive

import studies.claim
import studies.patient
from search.sampler import BudgetSampler
from studies.claim import claim
from studies.store import REPLICATE, open_study, records

psycopg = pytest.importorskip("psycopg", reason="needs the extra `postgres`")
pytestmark = pytest.mark.timeout(120)  # a server starts four times


def _binaries() -> Path | None:
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    places += [Path(found).parent for found in [shutil.which("pg_ctl")] if found]
    return next((place for place in places if (place / "initdb").exists()), None)


@dataclass
class Server:
    folder: Path
    port: int
    account: dict[str, Any]  # for subprocess: PostgreSQL does not run as root

    @property
    def url(self) -> str:
        return f"postgresql://mola@127.0.0.1:{self.port}/postgres"

    def run(self, program: str, *arguments: str) -> None:
        binaries = _binaries()
        assert binaries is not None
        subprocess.run(
            [binaries / program, "-D", self.folder / "data", *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            **self.account,
        )

    def start(self) -> None:
        options = f"-p {self.port} -c fsync=off -c listen_addresses=127.0.0.1 -k {self.folder}"
        self.run("pg_ctl", "-w", "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        self.run("pg_ctl", "-w", "-m", mode, "stop")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if _binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    account: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp())  # pytest's own cannot be entered by another account
    if os.geteuid() == 0:
        account = {"user": "postgres", "group": "postgres", "extra_groups": []}
        try:
            shutil.chown(folder, "postgres", "postgres")
        except LookupError:
            pytest.skip("PostgreSQL does not run as root, and there is no account postgres")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    server = Server(folder, port, account)
    try:
        server.run("initdb", "-U", "mola", "-A", "trust", "--no-sync")
        server.start()
        yield server
        server.stop()
    finally:
        shutil.rmtree(folder)


@contextmanager
def opened(
    server: Server, name: str, on_trouble: Callable[[str | None], None]
) -> Iterator[optuna.Study]:
    study = open_study(
        name,
        server.url,
        SPEC,
        sampler=BudgetSampler(SPEC.budget, seed=SPEC.seed),
        pruner=optuna.pruners.NopPruner(),
        on_trouble=on_trouble,
    )
    yield study
    study._storage._backend.engine.dispose()  # type: ignore[attr-defined]


class Outage(PretendPool):
    """Do something to the server at some polls."""

    def __init__(self, at: dict[int, Callable[[], None]]) -> None:
        super().__init__()
        self.at = at
        self.polls = 0

    def poll(self, timeout_seconds: float) -> list[Any]:
        self.polls += 1
        self.at.get(self.polls, lambda: None)()
        return super().poll(timeout_seconds)


def test_a_server_that_restarts_or_stays_away_loses_and_repeats_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies.patient, "FIRST_PAUSE_SECONDS", 0.01)
    heard: list[str | None] = []

    def hear(trouble: str | None) -> None:
        heard.append(trouble)
        if len(heard) == 4:
            server.start()

    def restart() -> None:
        server.stop()
        server.start()

    with opened(server, "mine", hear) as study:
        drive(study, Outage({7: restart, 15: server.stop}), RULES)
        trials = records(study)
    assert all("refused" in str(trouble) for trouble in heard[1:4]), heard
    assert heard[-1] is None
    done = [r for r in trials if r.state == "COMPLETE"]
    assert done == trials
    assert set(Counter((r.allocation, r.seed) for r in done).values()) == {1}
    assert sum(r.label != REPLICATE for r in done) == RULES.trials


HOLD = """
import sys, optuna, studies.claim
from studies.claim import claim
studies.claim.BEAT_SECONDS = 0.1
with claim(optuna.load_study(study_name="held", storage=sys.argv[1]), sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_driver_is_told_so_until_the_first_is_gone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies.claim, "SETTLE_SECONDS", 0)
    root = str(Path(studies.claim.__file__).parent.parent)
    with (
        opened(server, "held", lambda trouble: None) as study,
        subprocess.Popen(
            [sys.executable, "-c", HOLD, server.url],
            env={**os.environ, "PYTHONPATH": root},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as holder,
    ):
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        taken = pytest.raises(ValueError, match=f"another search works on .* {holder.pid} on ")
        with taken, claim(study, server.url):
            pass
        holder.kill()
        holder.wait()
        with claim(study, server.url) as held:
            held.check()
