"""Run trials in Ray actors, one process per worker.

Ray is imported only once a pool is opened.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mola.events import Event, Finished, Rung
from search.full.results import Run
from search.workers.clock import AwakeClock
from search.workers.layout import Layout, capacity, follow, plan_layout
from search.workers.pool import Failed, Job, Memory, PoolError
from search.workers.proxy import ProxyWorker, Task
from search.workers.ray_runtime import RayWatch, cause_of, connect, failure_of

if TYPE_CHECKING:
    from mola.data import TaskData

SLICE_SECONDS = 1.0
"""How long a worker trains before it reports: the beat of the progress display."""

MOST_FAILED_STARTS = 3
MOST_RAY_DEATHS = 3  # without a finished trial between them

LOAD_SECONDS = 3600.0  # that a worker may take to come up: it may download its model
STOP_SECONDS = 600.0  # that a worker may take to end a trial: it finishes a step or an evaluation
HEALTH_SECONDS = 5.0  # between two looks at Ray itself
GROWTH_SECONDS = 30.0  # between two looks at how many workers the cluster holds


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
    since: float  # of the pool's clock, when it got into LOADING or STOPPING
    job: Job | None = None
    pid: int = 0  # known once it has loaded


class RayPool:
    """A pool of `ProxyWorker` actors; implements `search.workers.pool.Pool`.

    A worker that dies, or whose trial raises, is replaced by a fresh process: whatever it left in
    memory goes with it. Only a loss that is not finite leaves the worker in place. A Ray that was
    started here and died is started again. Where the number of workers is left to the pool, it
    follows the nodes that join a cluster or leave it.

    Args:
        task: what all trials share.
        data: the tokenised rows.
        workers: number of workers; None: see `plan_layout`, and as many more as nodes that join
            later hold.
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
        self._ray, self._owns_ray = connect(address)
        self._clock = AwakeClock()
        self._looked = 0.0
        self._death: str | None = None  # of Ray
        self._failed_starts = 0
        self._deaths = 0
        try:
            self._watch = RayWatch(self._ray, local=self._owns_ray and address is None)
            nodes = self._watch.nodes() or []
            self.layout = plan_layout(nodes, workers, gpus_per_worker)
            self._follows = workers is None and not self._watch.local
            self._grown = 0.0
            self._capacity = capacity(nodes, self.layout)
            self._task = task
            self._rows = data
            self._start_workers()
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
            worker.state, worker.since = _State.STOPPING, self._clock.look()
            worker.call = worker.actor.stop.remote()

    def kill(self, number: int) -> None:
        """End a trial whose worker does not answer, with the worker, which is replaced."""
        worker = self._find(number)
        if worker is not None:
            self._replace(worker)

    def poll(self, timeout_seconds: float) -> list[tuple[int, Event | Failed | Memory]]:
        """Wait until a call returns, and give the events that came with it."""
        all_busy = self.idle == 0
        calls = [worker.call for worker in self._workers if worker.call is not None]
        if not calls:
            return []
        self._ray.wait(calls, num_returns=1, timeout=timeout_seconds)
        now = self._clock.look()
        done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        events: list[tuple[int, Event | Failed | Memory]] = []
        for worker in list(self._workers):
            if worker.call in done:
                events += self._receive(worker)
            elif worker.state is _State.LOADING and now - worker.since > LOAD_SECONDS:
                self._count_failed_start(f"one did not come up in {LOAD_SECONDS:.0f} s")
                self._replace(worker)
            elif worker.state is _State.STOPPING and now - worker.since > STOP_SECONDS:
                self._replace(worker)
        if now - self._looked >= HEALTH_SECONDS:
            self._looked = now
            self._death = self._death or self._watch.death()
            if self._death is None and self._follows and now - self._grown >= GROWTH_SECONDS:
                self._grown = now
                self._follow_cluster(all_busy)
        if self._death is not None:  # last, so that no result that has come is lost
            events += self._after_death(self._death)
        return events

    def close(self) -> None:
        """End all workers at once, and Ray if this pool started it."""
        self._death = self._death or self._watch.death()
        for worker in self._workers:
            self._end(worker)
        self._disconnect()

    def _receive(self, worker: _Worker) -> list[tuple[int, Event | Failed | Memory]]:
        """Take a call's result, move the worker on, and give the events for the driver."""
        call, worker.call = worker.call, None
        job = worker.job
        try:
            result = self._ray.get(call)
        except Exception as error:  # the worker's boundary: whatever went wrong there
            failed = failure_of(self._ray, error)
            if isinstance(cause_of(error), FloatingPointError):
                worker.state, worker.job = _State.IDLE, None
                return [] if job is None else [(job.number, failed)]
            self._death = self._death or self._watch.death(at_once=True)
            if self._death is not None:  # it took the worker along
                return []
            if worker.state is _State.LOADING:
                # A model that cannot be read will not be readable the next time.
                self._count_failed_start(
                    failed.reason, hopeless=isinstance(cause_of(error), ValueError)
                )
            self._replace(worker)
            return [] if job is None else [(job.number, failed)]
        if job is None:  # loaded or stopped
            worker.pid = worker.pid or result
            worker.state = _State.IDLE
            self._failed_starts = 0
            return []
        if not result:
            self._replace(worker)
            return [(job.number, Failed("the worker answered with nothing"))]
        if isinstance(result[-1], (Finished, Run)):
            worker.state, worker.job = _State.IDLE, None
            self._deaths = 0
        elif isinstance(result[-1], Rung):
            worker.state = _State.AT_RUNG
        else:
            worker.call = worker.actor.advance.remote(SLICE_SECONDS)
        return [(job.number, event) for event in result]

    def _follow_cluster(self, all_busy: bool) -> None:
        """Start workers on nodes that have joined, and give up those that wait for a lost one.

        Args:
            all_busy: Whether there is work for more workers, as far as the pool can tell.
        """
        nodes = self._watch.nodes()
        if nodes is None:
            return
        wanted = follow(self.layout, self._capacity, capacity(nodes, self.layout))
        if all_busy:
            self._workers += [self._new_worker() for _ in range(wanted - self.size)]
        waiting = [worker for worker in self._workers if worker.state is _State.LOADING]
        for worker in waiting[: max(0, self.size - wanted)]:
            self._end(worker)
            self._workers.remove(worker)

    def _count_failed_start(self, reason: str, *, hopeless: bool = False) -> None:
        """Count a worker that did not come up.

        Raises:
            PoolError: Workers fail to start time and again, or the next would, too.
        """
        self._failed_starts += 1
        if hopeless or self._failed_starts >= MOST_FAILED_STARTS:
            raise PoolError(f"workers cannot be started: {reason}")

    def _replace(self, worker: _Worker) -> None:
        """Put a fresh process in the place of a worker."""
        self._end(worker)
        self._workers[self._workers.index(worker)] = self._new_worker()

    def _end(self, worker: _Worker) -> None:
        """End a worker's process, also one that is stopped or hangs where Ray does not reach it."""
        if self._death is None:
            self._ray.kill(worker.actor)
        if self._watch.local and worker.pid and _is_rays(worker.pid):
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    def _after_death(self, death: str) -> list[tuple[int, Event | Failed | Memory]]:
        """Start Ray again if it was ours; whatever ran is lost through no fault of its own.

        Raises:
            PoolError: It was not ours, or it dies time and again.
        """
        lost = [worker.job.number for worker in self._workers if worker.job is not None]
        self._deaths += 1
        if not self._watch.local or self._deaths >= MOST_RAY_DEATHS:
            raise PoolError(death)
        for worker in self._workers:
            self._end(worker)
        handler = signal.getsignal(signal.SIGTERM)
        self._ray.shutdown()
        self._ray, self._owns_ray = connect(None)
        signal.signal(signal.SIGTERM, handler)  # Ray takes it for itself
        self._death = None
        self._watch = RayWatch(self._ray, local=True)
        self._start_workers()
        return [(number, Failed(f"{death}; started again", blameless=True)) for number in lost]

    def _start_workers(self) -> None:
        self._data = self._ray.put(self._rows)
        self._workers = [self._new_worker() for _ in range(self.layout.workers)]

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
        return _Worker(actor, _State.LOADING, actor.load.remote(), self._clock.look())

    def _find(self, number: int) -> _Worker | None:
        return next((w for w in self._workers if w.job and w.job.number == number), None)

    def _disconnect(self) -> None:
        if self._owns_ray:
            self._ray.shutdown()


def _environment(layout: Layout) -> dict[str, str]:
    """Give the environment that must stand before a worker loads torch."""
    threads = str(layout.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }


def _is_rays(pid: int) -> bool:
    """Whether a process is one of Ray's workers, rather than a later one of the same id."""
    if not Path("/proc/self").exists():
        return True
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False
