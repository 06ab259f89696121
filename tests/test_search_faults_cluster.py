"""A Ray cluster that is joined, and then killed: a real one, started and ended here."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_search_faults_ray import ALLOCATION, HANGS, Scripted, wait_until_idle

from mola.settings import AdapterSettings, ModelSource, TrainSettings
from search.workers.pool import Job, PoolError
from search.workers.proxy import Task
from search.workers.ray_pool import RayPool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """The address of a cluster of this machine alone, and the session of its processes."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # nobody else may join it
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # a short path, since sockets lie in it
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={port}", f"--temp-dir={folder}", "--num-cpus=2"]
    with (
        (folder / "head.txt").open("wb") as output,
        subprocess.Popen(
            [*command, "--include-dashboard=false", "--disable-usage-stats"],
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        try:
            while "Ray runtime started" not in (folder / "head.txt").read_text():
                assert process.poll() is None, (folder / "head.txt").read_text()
                time.sleep(0.1)
            yield f"127.0.0.1:{port}", process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    shutil.rmtree(folder)


def test_a_cluster_that_dies_is_a_clear_error_and_not_the_end_of_the_process(
    head: tuple[str, int],
) -> None:
    """In a process of its own: Ray reads once, when it is imported, whether it has a token."""
    address, session = head
    program = f"import {__name__} as t; t.lose_cluster({address!r}, {session})"
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 0


def lose_cluster(address: str, session: int) -> None:
    """Join a cluster, kill it during a trial, and go on until that is an error."""
    task = Task(ModelSource(), AdapterSettings(), TrainSettings(steps=4))
    pool = RayPool(task, None, workers=2, address=address, worker=Scripted)  # type: ignore[arg-type]
    try:
        wait_until_idle(pool)
        pool.start(Job(1, ALLOCATION, HANGS))
        assert pool.poll(0.5) == []
        os.killpg(session, signal.SIGKILL)
        with pytest.raises(PoolError, match="the Ray cluster does not answer any more"):
            while True:
                pool.poll(1)
    finally:
        pool.close()
