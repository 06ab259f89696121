"""Run trials in Ray actors, one process per worker.

Ray is imported only once a pool is opened.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mola.events import Event, Finished, Rung
from search.full.results import Run
from search.workers.layout import Layout, plan_layout
from search.workers.pool import Failed, Job, Memory, PoolError
from search.workers.proxy import ProxyWorker, Task

if TYPE_CHECKING:
    from mola.data import TaskData

SLICE_SECONDS = 1.0
"""How long a worker trains before it reports: the beat of the progress display."""

MOST_FAILED_STARTS = 3


class _State(Enum):
    """What a worker is doing; in LOADING, RUNNING and STOPPING a call to it is under way."""

    LOADING = 1
    IDLE = 2
    RUNNING = 3
    AT_RUNG = 4
    STOPPING = 5


@dataclass
class _Worker:
    actor: Any
    state: _State
    call: Any  # the ObjectRef of the call under way, else None
    job: Job | None = None
    pid: int = 0  # known once it has loaded


class RayPool:
    """A pool of `ProxyWorker` actors; implements `search.workers.pool.Pool`.

    A worker that dies, or whose trial raises, is replaced by a fresh process: whatever it left in
    memory goes with it. Only a loss that is not finite leaves the worker in place.

    Args:
        task: what all trials share.
        data: the tokenised rows.
        workers: number of workers; None: see `plan_layout`.
        gpus_per_worker: GPUs of each; None: see `plan_layout`.
        address: of a Ray cluster to join, or `auto`; None starts Ray on this machine, reachable
            from this machine alone.
        worker: what runs in the processes.

    Raises:
        PoolError: Ray cannot be started.
        ValueError: there is no such cluster, or the workers do not fit on it.
    """

    def __init__(
        self,
        task: Task,
        data: TaskData,
        *,
        workers: int | None = None,
        gpus_per_worker: float | None = None,
        address: str | None = None,
        worker: type[ProxyWorker] = ProxyWorker,
    ) -> None:
        self._worker_type = worker
        self._ray, self._owns_ray = _connect(address)
        try:
            nodes = [n["Resources"] for n in self._ray.nodes() if n["Alive"]]
            self.layout = plan_layout(nodes, workers, gpus_per_worker)
            self._task = task
            self._data = self._ray.put(data)
            self._failed_starts = 0
            self._workers = [self._new_worker() for _ in range(self.layout.workers)]
        except BaseException:
            self._disconnect()
            raise

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self._workers)

    @property
    def idle(self) -> int:
        """Number of workers that can start a trial now."""
        return sum(worker.state is _State.IDLE for worker in self._workers)

    def start(self, job: Job) -> None:
        """Start a trial on an idle worker."""
        worker = next(w for w in self._workers if w.state is _State.IDLE)
        worker.job = job
        worker.state = _State.RUNNING
        worker.call = worker.actor.start.remote(job, SLICE_SECONDS)

    def resume(self, number: int) -> None:
        """Let a trial go on after a rung."""
        worker = self._find(number)
        if worker is not None and worker.state is _State.AT_RUNG:
            worker.state = _State.RUNNING
            worker.call = worker.actor.advance.remote(SLICE_SECONDS)

    def stop(self, number: int) -> None:
        """End a trial; its worker is idle again as soon as the step under way is finished."""
        worker = self._find(number)
        if worker is not None:
            worker.job = None
            worker.state = _State.STOPPING
            worker.call = worker.actor.stop.remote()

    def poll(self, timeout_seconds: float) -> list[tuple[int, Event | Failed | Memory]]:
        """Wait until a call returns, and give the events that came with it."""
        calls = [worker.call for worker in self._workers if worker.call is not None]
        if not calls:
            return []
        self._ray.wait(calls, num_returns=1, timeout=timeout_seconds)
        done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        events: list[tuple[int, Event | Failed | Memory]] = []
        for worker in list(self._workers):
            if worker.call in done:
                events += self._receive(worker)
        return events

    def close(self) -> None:
        """End all workers at once, and Ray if this pool started it."""
        for worker in self._workers:
            self._ray.kill(worker.actor)
        self._disconnect()

    def _receive(self, worker: _Worker) -> list[tuple[int, Event | Failed | Memory]]:
        """Take a call's result, move the worker on, and give the events for the driver."""
        call, worker.call = worker.call, None
        job = worker.job
        try:
            result = self._ray.get(call)
        except Exception as error:  # the worker's boundary: whatever went wrong there
            failed = _failure(self._ray, error)
            if isinstance(_cause(error), FloatingPointError):
                worker.state, worker.job = _State.IDLE, None
            else:
                # A model that cannot be read will not be readable the next time.
                hopeless = isinstance(_cause(error), ValueError)
                self._replace(worker, failed.reason, hopeless=hopeless)
            return [] if job is None else [(job.number, failed)]
        if job is None:  # loaded or stopped
            worker.pid = worker.pid or result
            worker.state = _State.IDLE
            self._failed_starts = 0
            return []
        if isinstance(result[-1], (Finished, Run)):
            worker.state, worker.job = _State.IDLE, None
        elif isinstance(result[-1], Rung):
            worker.state = _State.AT_RUNG
        else:
            worker.call = worker.actor.advance.remote(SLICE_SECONDS)
        return [(job.number, event) for event in result]

    def _replace(self, worker: _Worker, reason: str, *, hopeless: bool) -> None:
        """Put a fresh process in the place of a worker.

        Raises:
            PoolError: workers fail to start time and again, or the next would, too.
        """
        if worker.state is _State.LOADING:
            self._failed_starts += 1
            if hopeless or self._failed_starts >= MOST_FAILED_STARTS:
                raise PoolError(f"workers cannot be started: {reason}")
        self._ray.kill(worker.actor)
        self._workers[self._workers.index(worker)] = self._new_worker()

    def _new_worker(self) -> _Worker:
        actor = (
            self._ray.remote(self._worker_type)
            .options(
                num_cpus=self.layout.cpus,
                num_gpus=self.layout.gpus,
                max_restarts=0,
                runtime_env={"env_vars": _environment(self.layout)},
            )
            .remote(self._task, self._data, self.layout.device, self.layout.threads)
        )
        return _Worker(actor, _State.LOADING, actor.load.remote())

    def _find(self, number: int) -> _Worker | None:
        return next((w for w in self._workers if w.job and w.job.number == number), None)

    def _disconnect(self) -> None:
        if self._owns_ray:
            self._ray.shutdown()


def _connect(address: str | None) -> tuple[ModuleType, bool]:
    """Start or join Ray, quietly.

    Returns:
        The module, and whether Ray was started or joined here rather than by the caller.

    Raises:
        PoolError: Ray cannot be started.
        ValueError: there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray would run the workers at niceness 15, where a busy machine starves them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if address is None:
        # Despite its name this holds on Linux, too: Ray then listens on the loopback address.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    if ray.is_initialized():
        return ray, False
    # Whatever log_to_driver says, Ray prints its nodes' errors on stdout, a paragraph for each
    # dead worker. There is no switch; without this function it has nothing to print with.
    ray._private.worker.print_to_stdstream = _print_nothing
    packages = Path(__file__).resolve().parents[2]
    environment = {"py_modules": [str(packages / p) for p in ("mola", "studies", "search")]}
    try:
        ray.init(
            address=address or "local",
            namespace=f"mola-{uuid4().hex[:8]}",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=environment if address else None,
        )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        if address is not None:
            raise ValueError(f"--address {address}: cannot join the cluster: {reason}") from error
        raise PoolError(f"cannot start Ray on this machine: {reason}") from error
    return ray, True


def _print_nothing(*_: Any, **__: Any) -> None:
    """Stand in for Ray's own printing; a trial's failure is told in our words."""


def _environment(layout: Layout) -> dict[str, str]:
    """Give the environment that must stand before a worker loads torch."""
    threads = str(layout.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }


def _cause(error: BaseException) -> BaseException:
    """Give the exception that was raised in the worker, or the one of Ray itself."""
    return getattr(error, "cause", None) or error


def _failure(ray: ModuleType, error: BaseException) -> Failed:
    """Say in one line what ended a call to a worker."""
    cause = _cause(error)
    text = " ".join(str(cause).split())
    if isinstance(cause, FloatingPointError):
        return Failed(text, retry=False)
    if isinstance(error, ray.exceptions.OutOfMemoryError) or "running low on memory" in text:
        return Failed("Ray ended the worker because the machine's memory was nearly full")
    if isinstance(error, ray.exceptions.RayActorError):
        return Failed("the worker's process died: killed from outside, or out of memory")
    return Failed(f"{type(cause).__name__}: {text[:300]}" if text else type(cause).__name__)
