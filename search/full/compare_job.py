"""Do the full fine-tunes of a comparison on a pool's workers, each once, and record them."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from mola.allocation import Allocation
from mola.events import Step
from search.console.display import duration
from search.deadline import Deadline
from search.full.results import CHECKPOINT, Run
from search.full.store import record_failure, record_run, runs_of
from search.full.worker import FullJob
from search.workers.clock import AwakeClock
from search.workers.pool import Failed, Pool

POLL_SECONDS = 0.5
SAVE_SECONDS = 120.0  # given to the workers to write their checkpoints when a stop is requested
MOST_TRIES = 2


@dataclass
class _Running:
    """A fine-tune that is running.

    Attributes:
        job: What the worker was told.
        since: Of the clock, when it started.
        heard: Of the same clock, when something was last heard of it.
        may_evaluate: Whether nothing need be heard of it: an evaluation tells of itself only at
            its end, and comes after the last step, which a checkpoint may already hold.
    """

    job: FullJob
    since: float
    heard: float
    may_evaluate: bool


class StopRequestedError(RuntimeError):
    """A stop was requested; the fine-tunes under way are saved."""


@dataclass(frozen=True)
class Wanted:
    """What is to be fine-tuned.

    Attributes:
        allocations: By name.
        seeds: Of each.
        steps: Optimizer steps of each run.
        folder: Of all adapters.
    """

    allocations: Mapping[str, Allocation]
    seeds: Sequence[int]
    steps: int
    folder: Path


def missing_runs(comparison: optuna.Study, wanted: Wanted) -> list[FullJob]:
    """List what is not done yet, seed by seed, so that an interruption leaves whole blocks."""
    done = {(run.seed, run.experts) for run in runs_of(comparison)}
    missing = [
        (seed, name, allocation)
        for seed in wanted.seeds
        for name, allocation in wanted.allocations.items()
        if (seed, allocation.experts) not in done
    ]
    return [
        FullJob(number, allocation, seed, name=name, folder=wanted.folder / f"{name}-seed-{seed}")
        for number, (seed, name, allocation) in enumerate(missing)
    ]


def finish_runs(
    comparison: optuna.Study,
    jobs: Sequence[FullJob],
    steps: int,
    pool: Pool,
    say: Callable[[str], None],
    stop_requested: Callable[[], bool],
    deadline: Deadline,
) -> list[FullJob]:
    """Run the jobs; one that fails, or whose worker hangs, is tried once more.

    Args:
        comparison: Where results are recorded.
        jobs: What to run, with distinct numbers.
        steps: Optimizer steps of each.
        pool: Of `FullWorker`s.
        say: Told of progress, a line at a time.
        stop_requested: Asked between events.
        deadline: Says which of them hang; learns from those that finish.

    Returns:
        The jobs that failed for good.

    Raises:
        StopRequestedError: A stop was requested.
        PoolError: No worker is left and none can be started.
    """
    clock = AwakeClock()
    for run in runs_of(comparison):
        deadline.learn(run.train_seconds)
    waiting, running = deque(jobs), dict[int, _Running]()
    tries: Counter[int] = Counter()
    lost: list[FullJob] = []
    while waiting or running:
        if stop_requested():
            _save(pool, running)
            raise StopRequestedError("stopped; the fine-tunes under way are saved")
        while pool.idle and waiting:
            job = waiting.popleft()
            now = clock.look()
            trained = (job.folder / CHECKPOINT).exists()  # perhaps to the last step
            running[job.number] = _Running(job, since=now, heard=now, may_evaluate=trained)
            pool.start(job)
        for job, event in _events(pool, running, deadline, clock):
            if isinstance(event, Step):
                running[job.number].may_evaluate = event.step >= steps
                _say_step(say, job, event, steps)
            elif isinstance(event, Run):
                seconds = clock.look() - running.pop(job.number).since  # with the evaluation
                deadline.learn(max(seconds, event.train_seconds))
                record_run(comparison, event)
                (job.folder / CHECKPOINT).unlink(missing_ok=True)
                say(_result(job, event))
            elif isinstance(event, Failed):
                del running[job.number]
                record_failure(comparison, job.name, job.allocation, job.seed, event.reason)
                tries[job.number] += 1
                again = event.retry and tries[job.number] < MOST_TRIES
                (waiting if again else lost).append(job)
                say(f"{_title(job)} failed: {event.reason}")
    return lost


def _events(
    pool: Pool, running: Mapping[int, _Running], deadline: Deadline, clock: AwakeClock
) -> Iterator[tuple[FullJob, Any]]:
    """Give what happened to the jobs; the end of those that hang, too."""
    for number, event in pool.poll(POLL_SECONDS):
        if number in running:
            running[number].heard = clock.look()
            yield running[number].job, event
    now = clock.look()
    for number, run in list(running.items()):
        silent = 0.0 if run.may_evaluate else now - run.heard
        reason = deadline.overdue(now - run.since, silent)
        if reason is not None:
            pool.kill(number)
            yield run.job, Failed(reason)


def _save(pool: Pool, running: Mapping[int, _Running]) -> None:
    """Let the workers write their checkpoints, as long as that takes within reason."""
    busy = pool.idle + len(running)
    for number in running:
        pool.stop(number)
    deadline = time.monotonic() + SAVE_SECONDS
    while pool.idle < busy and time.monotonic() < deadline:
        pool.poll(POLL_SECONDS)


def _say_step(say: Callable[[str], None], job: FullJob, step: Step, steps: int) -> None:
    if step.step % max(1, steps // 10) == 0 and step.step < steps:
        say(f"{_title(job)}: step {step.step} of {steps}, loss {step.loss:.4f}")


def _result(job: FullJob, run: Run) -> str:
    test = "" if run.test is None else f", test {run.test.objective:.4f}"
    seconds = duration(run.train_seconds)
    return f"{_title(job)}: validation {run.validation.objective:.4f}{test}  {seconds}"


def _title(job: FullJob) -> str:
    return f"{job.name}, seed {job.seed}"
