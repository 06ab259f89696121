"""Workers that only pretend to train and a store that does not wait for the disk."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, event

from mola.events import Event, Finished, Rung, Step
from search.workers.pool import Failed, Job


@pytest.fixture
def no_waiting_for_the_disk() -> Iterator[None]:
    """Leave out the sync after each transaction: only a loss of power would make a difference."""

    def relax(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", relax)
    yield
    event.remove(Engine, "connect", relax)


class KilledError(BaseException):
    """Stands for kill -9: the driver gets no chance to write anything."""


def objective(job: Job) -> float:
    """Lower layers want experts; a seed moves all allocations alike, and each a little."""
    weights = (4, 3, 2, 1)
    wanted = sum(w * n for w, n in zip(weights, job.allocation.experts, strict=True))
    jitter = hash((job.allocation.experts, job.seed)) % 1000 / 1e5
    return 5 - wanted / 20 + 0.1 * job.seed + jitter


class PretendPool:
    """Take one step of every running trial per poll.

    Args:
        size: number of workers.
        script: what happens to a job, in place of a successful training; a job hangs after it.
        die_after: the driver is killed at so many finished trials.
        ready_after: polls until the workers are up.
    """

    def __init__(
        self,
        size: int = 2,
        script: Callable[[Job], list[Event | Failed]] | None = None,
        die_after: float = math.inf,
        ready_after: int = 1,
    ) -> None:
        self.size = size
        self.script = script or train
        self.die_after = die_after
        self.ready_after = ready_after
        self.jobs: list[Job] = []
        self.most_running = 0
        self.running: dict[int, list[Event | Failed]] = {}
        self.waiting: set[int] = set()
        self.killed: list[int] = []
        self.closed = False

    @property
    def idle(self) -> int:
        return 0 if self.ready_after > 0 else self.size - len(self.running)

    def start(self, job: Job) -> None:
        assert self.idle > 0, "the driver asked too much of the pool"
        self.jobs.append(job)
        self.running[job.number] = list(self.script(job))
        self.most_running = max(self.most_running, len(self.running))

    def poll(self, timeout_seconds: float) -> list[tuple[int, Event | Failed]]:
        self.ready_after -= 1
        if self.die_after < 0:
            raise KilledError
        events: list[tuple[int, Event | Failed]] = []
        for number in [n for n in self.running if n not in self.waiting and self.running[n]]:
            event = self.running[number].pop(0)
            events.append((number, event))
            if isinstance(event, Rung):
                self.waiting.add(number)
            if isinstance(event, (Finished, Failed)):
                del self.running[number]
                self.die_after -= 1
        return events

    def resume(self, number: int) -> None:
        self.waiting.discard(number)

    def stop(self, number: int) -> None:
        self.running.pop(number, None)
        self.waiting.discard(number)

    def kill(self, number: int) -> None:
        self.killed.append(number)
        self.stop(number)

    def close(self) -> None:
        self.closed = True


def train(job: Job) -> list[Event | Failed]:
    value = objective(job)
    return [Step(1, 2.0), Step(2, 1.5), Rung(2, value + 1, 0.4), Step(3, 1.2), finished(value)]


def finished(value: float) -> Finished:
    return Finished(
        step=4,
        objective=value,
        accuracy=0.5,
        standard_error=0.01,
        train_seconds=1.0,
        eval_seconds=0.1,
    )
