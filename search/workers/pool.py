"""Say what the driver asks of workers, whatever runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mola.allocation import Allocation
from mola.events import Event


@dataclass(frozen=True)
class Job:
    """What a worker is told to train.

    Attributes:
        number: Number of the trial in the study.
        allocation: Experts per layer.
        seed: Seed of the data order, dropout and fresh weights.
        rungs: Steps after which it is evaluated on the way and waits for a decision.
        save_memory: Whether it trades time for memory, without another result.
    """

    number: int
    allocation: Allocation
    seed: int
    rungs: tuple[int, ...] = ()
    save_memory: bool = False


@dataclass(frozen=True)
class Failed:
    """The end of a trial that broke.

    Attributes:
        reason: One line.
        retry: Whether another try may end differently.
        blameless: Whether it was ended by something outside it, such as the end of Ray.
        out_of_memory: Whether a GPU or the machine had too little memory for it.
    """

    reason: str
    retry: bool = True
    blameless: bool = False
    out_of_memory: bool = False


@dataclass(frozen=True)
class Memory:
    """What a worker's GPUs hold.

    Attributes:
        used: Bytes reserved at the worker's peak so far, over its GPUs.
        total: Bytes that these GPUs have.
    """

    used: int
    total: int


class PoolError(RuntimeError):
    """No worker is left and none can be started."""


class Pool(Protocol):
    """Workers that run one trial each.

    `Memory` may come at any time and asks for nothing. The other events of a trial come in order.
    After a `Rung` the trial waits for `resume` or `stop`; `Finished` and `Failed` end it and free
    its worker.
    """

    @property
    def size(self) -> int:
        """Number of workers: idle, busy, and on their way up."""

    @property
    def idle(self) -> int:
        """Number of workers that can start a trial now."""

    def start(self, job: Job) -> None:
        """Start a trial on an idle worker; trouble comes as an event, not as an exception."""

    def poll(self, timeout_seconds: float) -> list[tuple[int, Event | Failed | Memory]]:
        """Wait until something happened, at most so long.

        Returns:
            (number of the trial, event), in order per trial; empty when only the number of idle
            workers changed or the time is up.

        Raises:
            PoolError: no worker is left and none can be started.
        """

    def resume(self, number: int) -> None:
        """Let a trial go on after a rung."""

    def stop(self, number: int) -> None:
        """End a trial before its time; later events of it may be ignored."""

    def kill(self, number: int) -> None:
        """End a trial whose worker does not answer, with the worker, which is replaced."""

    def close(self) -> None:
        """End all workers and whatever they run."""
