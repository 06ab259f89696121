"""Ray workers on a tiny model: few tests, as each starts processes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from mola.allocation import Allocation
from mola.data import TaskData, encode_splits, load_splits
from mola.events import Event, Finished, Rung, Step
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from search.workers.pool import Failed, Job, PoolError
from search.workers.proxy import ProxyWorker, Task
from search.workers.ray_pool import RayPool

ALLOCATION = Allocation([1, 2, 3, 2])
JOB = Job(0, ALLOCATION, 0, rungs=(2,))


def make_task(
    model: Path, steps: int = 4, learning_rate: float = 1e-2, dropout: float = 0.05
) -> Task:
    return Task(
        ModelSource(str(model)),
        AdapterSettings(r=2, lora_dropout=dropout),
        TrainSettings(steps=steps, batch_size=4, learning_rate=learning_rate),
    )


@pytest.fixture(scope="module")
def data(tiny_model_dir: Path, choices_dir: Path) -> TaskData:
    from mola.base import load_tokenizer

    return encode_splits(
        load_splits(str(choices_dir)),
        load_tokenizer(ModelSource(str(tiny_model_dir))),
        prompt_template=None,
        max_length=256,
        name="choices",
    )


def run_in_process(worker: ProxyWorker, job: Job) -> list[Event]:
    events = worker.start(job, 60)
    while not isinstance(events[-1], Finished):
        events += worker.advance(60)
    return events


def test_a_worker_stops_at_each_rung_and_gives_the_same_result_every_time(
    tiny_model_dir: Path, data: TaskData
) -> None:
    worker = ProxyWorker(make_task(tiny_model_dir), data, "cpu", 1)
    worker.load()
    first = worker.start(JOB, 60)
    assert [type(event) for event in first] == [Step, Step, Rung]
    rest = worker.advance(60)
    assert [type(event) for event in rest] == [Step, Step, Finished]
    worker.start(Job(1, Allocation([2, 2, 2, 2]), 1), 60)
    worker.stop()
    again = run_in_process(worker, JOB)
    for before, after in zip([*first, *rest], again, strict=True):
        if isinstance(before, Step):
            assert before == after
        else:
            assert not isinstance(after, Step)
            assert before.objective == after.objective


def test_an_evaluation_on_the_way_does_not_change_the_result(
    tiny_model_dir: Path, data: TaskData
) -> None:
    """So that replicates, which have no rungs, compare with the trials of the search."""
    worker = ProxyWorker(make_task(tiny_model_dir), data, "cpu", 1)
    worker.load()
    last = [run_in_process(worker, Job(0, ALLOCATION, 0, rungs))[-1] for rungs in [(), (1, 3)]]
    assert isinstance(last[0], Finished)
    assert isinstance(last[1], Finished)
    assert last[0].objective == last[1].objective


@pytest.mark.parametrize("dropout", [0.05, 0.0])
def test_a_trial_that_saves_memory_has_the_same_result(
    tiny_model_dir: Path, data: TaskData, dropout: float
) -> None:
    """Exactly, or but for the order of sums where the micro-batch is halved."""
    worker = ProxyWorker(make_task(tiny_model_dir, dropout=dropout), data, "cpu", 1)
    worker.load()
    usual, thrifty, again = (
        run_in_process(worker, Job(0, ALLOCATION, 0, save_memory=less))[-1]
        for less in (False, True, False)
    )
    assert isinstance(usual, Finished)
    assert isinstance(thrifty, Finished)
    assert isinstance(again, Finished)
    tolerance = 0 if dropout else 1e-5
    assert thrifty.objective == pytest.approx(usual.objective, rel=tolerance, abs=0)
    assert again.objective == usual.objective


def test_a_worker_reports_when_its_time_is_up(tiny_model_dir: Path, data: TaskData) -> None:
    worker = ProxyWorker(make_task(tiny_model_dir), data, "cpu", 1)
    worker.load()
    assert [event.step for event in worker.start(Job(0, ALLOCATION, 0), 0)] == [1]
    assert [event.step for event in worker.advance(0)] == [2]
    worker.stop()


def close(pool: RayPool) -> None:
    """Close a pool, and let go of Ray's processes, which it kills but does not wait for."""
    pool.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def wait_until_idle(pool: RayPool, workers: int) -> None:
    while pool.idle < workers:
        pool.poll(60)


def test_workers_that_cannot_load_the_model_are_given_up(tmp_path: Path, data: TaskData) -> None:
    pool = RayPool(make_task(tmp_path / "nothing"), data, workers=1)
    try:
        with pytest.raises(PoolError, match="workers cannot be started: ValueError: model"):
            wait_until_idle(pool, 1)
    finally:
        close(pool)


@pytest.fixture(scope="module")
def pool(tiny_model_dir: Path, data: TaskData) -> Iterator[RayPool]:
    """Two workers for the tests below; while they hold all cores, no other pool can start."""
    pool = RayPool(make_task(tiny_model_dir, steps=400), data, workers=2)
    yield pool
    close(pool)


def next_events(pool: RayPool) -> list[tuple[int, Event | Failed]]:
    while not (events := pool.poll(60)):
        pass
    for number, event in events:
        if isinstance(event, Rung):
            pool.resume(number)
    return events


@pytest.mark.timeout(300)  # three times a process is started, and may have to share the cores
def test_a_killed_worker_fails_its_trial_and_is_replaced_while_the_other_goes_on(
    pool: RayPool, capfd: pytest.CaptureFixture[str]
) -> None:
    wait_until_idle(pool, 2)
    pool.start(Job(5, ALLOCATION, 0))
    pool.start(Job(6, Allocation([2, 2, 2, 2]), 0))
    seen: list[tuple[int, Event | Failed]] = []
    while {number for number, _ in seen} != {5, 6}:
        seen += next_events(pool)
    victim = next(w for w in pool._workers if w.job is not None and w.job.number == 5)
    os.kill(victim.pid, signal.SIGKILL)
    while not any(isinstance(event, Failed) for _, event in seen):
        seen += next_events(pool)
    number, failed = next((n, e) for n, e in seen if isinstance(e, Failed))
    assert number == 5
    assert isinstance(failed, Failed)
    assert failed.retry
    assert "died" in failed.reason
    assert pool.size == 2
    pool.stop(6)
    wait_until_idle(pool, 2)
    pool.start(Job(7, ALLOCATION, 0))
    assert {number for number, _ in next_events(pool)} == {7}
    pool.stop(7)
    assert capfd.readouterr() == ("", ""), "Ray's own chatter stays out of the terminal"


def listening(ancestor: int) -> set[str]:
    """The addresses on which a process and its descendants listen, from Linux's tables."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A":
                sockets[f"socket:[{rest[5]}]"] = local.split(":")[0]
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    found = set()
    for pid in parents:
        line = [pid]
        while line[-1] in parents:
            line.append(parents[line[-1]])
        if ancestor in line:
            for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
                with suppress(OSError):
                    found.add(sockets.get(str(descriptor.readlink()), ""))
    return found - {""}


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux's tables of sockets")
def test_ray_listens_on_the_loopback_address_alone() -> None:
    """In a process of its own: Ray reads once, when it is imported, where it may listen."""
    program = (
        "from search.workers.ray_runtime import connect; ray, _ = connect(None); "
        "print('up', flush=True); input(); ray.shutdown()"
    )
    with (
        socket.socket() as everywhere,
        Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True) as process,
    ):
        everywhere.bind(("0.0.0.0", 0))  # noqa: S104
        everywhere.listen()
        assert "00000000" in listening(os.getpid()), "the test sees what listens"
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        found = listening(process.pid)
        process.communicate("\n")
    assert found, "Ray listens"
    assert found <= LOOPBACK


def test_an_exception_in_a_trial_is_a_reason_in_one_line(pool: RayPool) -> None:
    wait_until_idle(pool, 2)
    pool.start(Job(0, Allocation([1, 2]), 0))  # the model has 4 layers
    ((number, failed),) = next_events(pool)
    assert number == 0
    assert isinstance(failed, Failed)
    assert failed.reason.startswith("ValueError: ")
    assert "\n" not in failed.reason
