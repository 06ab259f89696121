"""Say what the driver tells its listeners while a search runs: plain data for displays."""

from __future__ import annotations

from dataclasses import dataclass

from mola.events import Rung, Step
from search.workers.pool import Job, Memory


@dataclass(frozen=True)
class Phase:
    """A part of the search begins.

    Attributes:
        name: `search` or `confirmation`.
        done: Trials of it that are already in the study.
        total: Trials of it in all.
        workers: Number of workers; 0 if none is needed.
    """

    name: str
    done: int
    total: int
    workers: int


@dataclass(frozen=True)
class Started:
    """A trial began on a worker. `label`: why; see `TrialRecord.label`."""

    job: Job
    label: str


@dataclass(frozen=True)
class Progress:
    """A running trial took a step, was evaluated before its end, or told its GPU memory."""

    number: int
    event: Step | Rung | Memory


@dataclass(frozen=True)
class Ended:
    """A trial is over.

    Attributes:
        job: What ran.
        label: Why it ran.
        state: COMPLETE, PRUNED or FAIL.
        objective: The last one measured; None where there was none.
        seconds: Wall clock since its start.
        reason: Why it failed, else empty.
    """

    job: Job
    label: str
    state: str
    objective: float | None
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class Note:
    """A line that the person should read."""

    text: str


Update = Phase | Started | Progress | Ended | Note
