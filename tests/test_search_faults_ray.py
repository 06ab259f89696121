"""Workers that hang, die, answer nonsense or run out of memory, and a Ray that is killed."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import search.workers.ray_pool
from mola.allocation import Allocation
from mola.events import Event, Finished
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from search.workers.pool import Failed, Job, Memory, PoolError
from search.workers.proxy import ProxyWorker, Task
from search.workers.ray_pool import RayPool
from search.workers.ray_runtime import failure_of

FINE, HANGS, STOPPED, NOTHING, EMPTY, NO_GPU_MEMORY, SLOW_TO_STOP = range(7)
ALLOCATION = Allocation([1, 2])


class Scripted(ProxyWorker):
    """A worker without a model, whose trials go as their seeds say."""

    def load(self) -> int:
        return os.getpid()

    def start(self, job: Job, max_seconds: float) -> list[Event | Memory]:
        self.what = job.seed
        if job.seed == HANGS:
            time.sleep(10_000)
        if job.seed == STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)
        if job.seed == NO_GPU_MEMORY:
            import torch

            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if job.seed == NOTHING:
            return None  # type: ignore[return-value]
        if job.seed in (EMPTY, SLOW_TO_STOP):
            return []
        return [Finished(4, 1.0, 0.5, 0.01, float(os.getpid()), 0.1)]

    def stop(self) -> None:
        if self.what == SLOW_TO_STOP:
            time.sleep(10_000)


@pytest.fixture(scope="module")
def pool() -> Iterator[RayPool]:
    task = Task(ModelSource(), AdapterSettings(), TrainSettings(steps=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for Ray
        pool = RayPool(task, None, workers=2, worker=Scripted)  # type: ignore[arg-type]
        yield pool
        pool.close()
    with warnings.catch_warnings():  # Ray kills its processes and does not wait for them
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


pytestmark = [
    pytest.mark.timeout(300),  # Ray takes seconds to start, and is started three times
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def wait_until_idle(pool: RayPool) -> None:
    while pool.idle < pool.size:
        pool.poll(60)


def run(pool: RayPool, seed: int) -> Event | Failed | Memory:
    """Start a trial that ends at once, and give its end."""
    pool.start(Job(seed, ALLOCATION, seed))
    while not (events := pool.poll(60)):
        pass
    ((number, event),) = events
    assert number == seed
    return event


def pids(pool: RayPool) -> set[int]:
    return {worker.pid for worker in pool._workers}


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def check_replaced(pool: RayPool, before: set[int]) -> None:
    """Check that one of two workers is a fresh one, works, and that the old one has ended."""
    wait_until_idle(pool)
    (old,) = before - pids(pool)
    while not is_gone(old):
        pool.poll(0.1)
    assert len(pids(pool)) == pool.size == 2
    assert isinstance(run(pool, FINE), Finished)


@pytest.mark.parametrize("seed", [HANGS, STOPPED])
def test_a_worker_that_does_not_answer_is_killed_and_replaced(pool: RayPool, seed: int) -> None:
    wait_until_idle(pool)
    before = pids(pool)
    pool.start(Job(seed, ALLOCATION, seed))
    assert pool.poll(0.5) == []
    pool.kill(seed)
    check_replaced(pool, before)


@pytest.mark.parametrize("seed", [NOTHING, EMPTY])
def test_an_answer_without_content_is_a_failure(pool: RayPool, seed: int) -> None:
    wait_until_idle(pool)
    before = pids(pool)
    assert run(pool, seed) == Failed("the worker answered with nothing")
    check_replaced(pool, before)


def test_too_little_gpu_memory_is_told_as_such_and_given_back(pool: RayPool) -> None:
    wait_until_idle(pool)
    before = pids(pool)
    failed = run(pool, NO_GPU_MEMORY)
    assert isinstance(failed, Failed)
    assert failed.reason == "out of GPU memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert failed.out_of_memory
    assert failed.retry
    check_replaced(pool, before)


def test_a_worker_that_does_not_stop_is_replaced(
    pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_idle(pool)
    before = pids(pool)
    pool.start(Job(1, ALLOCATION, HANGS))
    pool.stop(1)
    monkeypatch.setattr(search.workers.ray_pool, "STOP_SECONDS", 0)
    pool.poll(0.1)
    check_replaced(pool, before)


@pytest.mark.slow
def test_workers_that_never_come_up_end_the_search(
    pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_idle(pool)
    monkeypatch.setattr(search.workers.ray_pool, "LOAD_SECONDS", 0)
    pool.start(Job(HANGS, ALLOCATION, HANGS))
    pool.kill(HANGS)
    with pytest.raises(PoolError, match="cannot be started: one did not come up in 0 s"):
        while True:
            pool.poll(0.001)
    monkeypatch.undo()
    wait_until_idle(pool)


def kill_ray(pool: RayPool, *names: str) -> None:
    """Kill processes of the Ray that the pool has started, and of no other."""
    processes = pool._ray._private.worker._global_node.all_processes
    for name in names:
        for info in processes[name]:
            os.kill(info.process.pid, signal.SIGKILL)


def test_a_ray_that_was_killed_is_started_again_but_not_for_ever(
    pool: RayPool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search.workers.ray_pool, "HEALTH_SECONDS", 0.2)
    for name, others in (("raylet", ()), ("gcs_server", ("raylet",))):
        wait_until_idle(pool)
        before, handler = pids(pool), signal.getsignal(signal.SIGTERM)
        pool.start(Job(7, ALLOCATION, HANGS))
        kill_ray(pool, name, *others)
        while not (events := pool.poll(1)):
            pass
        reason = f"Ray's own process {name} died; started again"
        assert events == [(7, Failed(reason, blameless=True))]
        assert pool.size == 2
        assert signal.getsignal(signal.SIGTERM) == handler
        wait_until_idle(pool)
        assert not pids(pool) & before
        assert all(is_gone(pid) for pid in before)
    pool.start(Job(7, ALLOCATION, HANGS))
    kill_ray(pool, "raylet")
    with pytest.raises(PoolError, match="Ray's own process raylet died"):
        while True:
            pool.poll(1)
    assert capfd.readouterr() == ("", "")


def test_too_little_memory_of_the_machine_is_told_as_such(pool: RayPool) -> None:
    error = pool._ray.exceptions.OutOfMemoryError("Task was killed due to the node running low")
    failed = failure_of(pool._ray, error)
    assert failed.out_of_memory
    assert failed.retry
    assert "memory was nearly full" in failed.reason
