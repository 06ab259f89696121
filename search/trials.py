"""Run trials on a pool: start what is due, judge rungs, record what became of each.

Free of Ray and torch: the workers stand behind `Pool`. What is due is for `search.driver` to say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from mola.allocation import Allocation
from mola.events import Event, Finished, Rung, Step
from search.deadline import Deadline
from search.sampler import BudgetExhausted
from search.updates import Ended, Note, Progress, Started, Update
from search.workers.clock import AwakeClock
from search.workers.pool import Failed, Job, Memory, Pool
from studies import encoding, store
from studies.patient import StoreError
from studies.records import SAVE_MEMORY_ATTR
from studies.spec import StudySpec
from studies.trial_storage import EndedElsewhereError

POLL_SECONDS = 0.5
"""Longest wait for an event, and so the longest that a request to stop goes unnoticed."""


class StopRequestedError(RuntimeError):
    """A stop was requested."""


class TooManyFailuresError(RuntimeError):
    """So many trials failed in a row that the next would, too."""


@dataclass
class _Run:
    """A trial that is running.

    Attributes:
        trial: In the study.
        job: What the worker was told.
        label: Why it runs.
        awake: Of the driver's clock at the trial's start.
        heard: Of the same clock when something was last heard of it.
        began: Of the monotonic clock.
        rungs: Maps steps to objectives.
    """

    trial: optuna.Trial
    job: Job
    label: str
    awake: float
    heard: float
    began: float = field(default_factory=time.monotonic)
    rungs: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class TrialLoop:
    """The trials of a study that run on a pool.

    Args:
        study: its sampler proposes allocations of `spec.budget`, its pruner judges rungs.
        spec: what the study is about.
        open_pool: starts the workers; called only if there is something to run.
        max_failures: so many failures in a row end the search.
        deadline: of a trial.
        notify: told of everything that happens, for display.
        stop_requested: asked between events; True ends the search.

    Attributes:
        done: allocations that are measured or pruned, by trials that are no replicates.
        started: whether this loop started any trial.
        exhausted: whether the sampler had nothing left to propose.
    """

    def __init__(
        self,
        study: optuna.Study,
        spec: StudySpec,
        open_pool: Callable[[], Pool],
        *,
        max_failures: int,
        deadline: Deadline,
        notify: Callable[[Update], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self.study = study
        self.spec = spec
        self.done: set[Allocation] = set()
        self.started = False
        self.exhausted = False
        self._open_pool = open_pool
        self._pool: Pool | None = None
        self._max_failures = max_failures
        self._deadline = deadline
        self._notify = notify
        self._stop_requested = stop_requested
        self._clock = AwakeClock()
        self._running: dict[int, _Run] = {}
        self._news: list[Update] = []  # of what is written with the transaction under way
        self._failures = 0
        self._hopeless = ""  # why
        self._distributions = encoding.distributions(spec.budget)

    @property
    def workers(self) -> int:
        """Number of workers; 0 before the first trial is due."""
        return self._pool.size if self._pool is not None else 0

    @property
    def under_way(self) -> list[tuple[str, Allocation]]:
        """Labels and allocations of the trials that are running."""
        return [(run.label, run.job.allocation) for run in self._running.values()]

    def waiting(self) -> list[store.TrialRecord]:
        """Read which trials are enqueued, by whomever."""
        if not self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return []
        return [r for r in store.records(self.study) if r.state == "WAITING"]

    def recall(self) -> None:
        """Learn from the study which allocations are done, and how long trials take."""
        history = store.records(self.study)
        for record in history:
            self._deadline.learn((record.train_seconds or 0.0) + (record.eval_seconds or 0.0))
        self.done = {
            record.allocation
            for record in history
            if record.state in ("COMPLETE", "PRUNED") and record.label != store.REPLICATE
        }

    def open(self) -> None:
        """Start the workers, unless they are there."""
        if self._pool is None:
            self._pool = self._open_pool()

    def run(self, due: Callable[[], bool]) -> None:
        """Run trials until none is due.

        Args:
            due: says whether another trial should start; only after `open` may it be so.

        Raises:
            StopRequestedError: a stop was requested.
            TooManyFailuresError: trials failed `max_failures` times in a row.
            PoolError: no worker can be started.
            StoreError: the store is out of reach for good.
            ForeignDataError: another program wrote to the study what cannot be understood.
        """
        pool = self._pool
        events: list[tuple[int, Event | Failed | Memory]] = []
        stop = False
        while pool is not None and (events or self._running or due()):
            # What a worker has done and what it is to do next are one transaction.
            with self._told(), self._letting_go(), store.at_once(self.study):
                for number, event in events:
                    with self._letting_go():
                        self._handle(pool, number, event)
                self._end_overdue(pool)
                self._give_up_if_hopeless()
                stop = self._stop_requested()
                while not stop and pool.idle and due():
                    self._start_next(pool)
                    self._give_up_if_hopeless()
            if stop:
                raise StopRequestedError("stopped by the user")
            events = pool.poll(POLL_SECONDS) if self._running or due() else []

    def interrupt_all(self, reason: str) -> None:
        """End all running trials for a reason that lies outside them."""
        with self._told():
            for number in list(self._running):
                with self._letting_go():
                    self._interrupt(number, reason)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tell listeners at the end what has happened within: what they hear of is in the store."""
        try:
            yield
        except (StoreError, StopRequestedError):  # while it was waited for
            self._news.clear()
            raise
        finally:
            news, self._news = self._news, []
            for update in news:
                self._notify(update)

    @contextmanager
    def _letting_go(self) -> Iterator[None]:
        """Go on where a trial turns out to have been ended by another program."""
        try:
            yield
        except UpdateFinishedTrialError:
            self._drop_ended()
        except EndedElsewhereError as error:
            self._drop_ended(error.numbers)

    def _end_overdue(self, pool: Pool) -> None:
        """Give up the trials whose workers hang."""
        now = self._clock.look()
        for number, run in list(self._running.items()):
            reason = self._deadline.overdue(now - run.awake, now - run.heard)
            if reason is not None:
                pool.kill(number)
                self._count_failure(number, Failed(reason))

    def _start_next(self, pool: Pool) -> None:
        """Ask for a trial, check it, give it to a worker, and only then write its parameters.

        Writing waits for the disk, and a worker should not. If the driver is killed in between, an
        enqueued allocation is still in the queue's record, and a proposal was not worth keeping.
        """
        enqueued = {record.number: record.allocation for record in self.waiting()}
        trial = self.study.ask()
        try:
            allocation = enqueued.get(trial.number) or encoding.from_params(trial.relative_params)
        except BudgetExhausted as error:
            self.exhausted = True
            self._refuse(trial, str(error))
            return
        except ValueError as error:  # nothing completes what someone else enqueued in part
            self._refuse(trial, str(error))
            self._strike(str(error))
            return
        label = trial.user_attrs.get("label", store.SEARCH)
        seed = trial.user_attrs.get("seed", self.spec.seed)
        # Nothing is decided at the rungs of a replicate, and an evaluation costs time.
        rungs = () if label == store.REPLICATE else self.spec.rungs
        thrifty = bool(trial.user_attrs.get(SAVE_MEMORY_ATTR))
        job = Job(trial.number, allocation, seed, rungs, save_memory=thrifty)
        now = self._clock.look()
        self._running[job.number] = _Run(trial, job, label, awake=now, heard=now)
        fits = allocation in self.spec.budget  # no sampler has seen what someone else enqueued
        if fits:
            self.started = True
            pool.start(job)
        store.mark(trial, label=label, seed=seed)
        for name, range_ in self._distributions.items():
            trial.suggest_int(name, range_.low, range_.high)
        self._news.append(Started(job, label))
        if not fits or encoding.from_params(trial.params) != allocation:
            pool.stop(job.number)
            self._fail(job.number, Failed(f"{allocation} is not in the budget", retry=False))

    def _refuse(self, trial: optuna.Trial, reason: str) -> None:
        """End a trial that was asked for and cannot run."""
        store.fail(self.study, trial, reason, retry=False)
        self._news.append(Note(reason))

    def _drop_ended(self, refused: Sequence[int] = ()) -> None:
        """Free the workers of trials that another program has ended, whatever it made of them.

        Args:
            refused: Numbers of those that had ended here, too; that is not so, and is not told.
        """
        for trial in self.study.get_trials(deepcopy=False):
            run = self._running.get(trial.number)
            if run is not None and trial.state.is_finished():
                assert self._pool is not None
                self._pool.stop(trial.number)
                del self._running[trial.number]
                ended = Ended(run.job, run.label, "", None, run.seconds)
                self._news.append(_as_elsewhere(ended, trial))
            elif trial.number in refused:
                self._news = [
                    _as_elsewhere(update, trial)
                    if isinstance(update, Ended) and update.job.number == trial.number
                    else update
                    for update in self._news
                ]
        self.recall()

    def _handle(self, pool: Pool, number: int, event: Event | Failed | Memory) -> None:
        """Record what happened to a trial; what comes after its end is ignored."""
        run = self._running.get(number)
        if run is None:
            return
        run.heard = self._clock.look()
        if isinstance(event, Failed):
            if event.blameless:
                self._interrupt(number, event.reason)
            else:
                self._count_failure(number, event)
        elif isinstance(event, Memory):
            self._news.append(Progress(number, event))
        elif (what := _not_finite(event)) is not None:
            pool.stop(number)
            reason = f"the {what} is not a finite number at step {event.step}"
            self._count_failure(number, Failed(reason, retry=False))
        elif isinstance(event, Finished):
            self._deadline.learn(event.train_seconds + event.eval_seconds)
            store.complete(self.study, run.trial, event)
            self._end(number, "COMPLETE", event.objective)
        elif isinstance(event, Rung):
            self._judge(pool, run, event)
        else:
            self._news.append(Progress(number, event))

    def _judge(self, pool: Pool, run: _Run, rung: Rung) -> None:
        """Record a rung once, and let the trial go on or prune it."""
        number = run.job.number
        if rung.step not in run.rungs:
            run.rungs[rung.step] = rung.objective
            run.trial.report(rung.objective, rung.step)
            self._news.append(Progress(number, rung))
            if run.label == store.SEARCH and run.trial.should_prune():
                pool.stop(number)
                store.prune(self.study, run.trial)
                self._end(number, "PRUNED", rung.objective)
                return
        pool.resume(number)

    def _end(self, number: int, state: str, objective: float) -> None:
        run = self._running.pop(number)
        self._failures = 0
        if run.label != store.REPLICATE:
            self.done.add(run.job.allocation)
        self._news.append(Ended(run.job, run.label, state, objective, run.seconds))

    def _count_failure(self, number: int, failed: Failed) -> None:
        self._fail(number, failed)
        self._strike(failed.reason)

    def _strike(self, reason: str) -> None:
        self._failures += 1
        if self._failures >= self._max_failures and not self._hopeless:
            self._hopeless = f"{self._failures} trials failed in a row, the last one: {reason}"

    def _give_up_if_hopeless(self) -> None:
        """End the search after too many failures, once all that has happened is recorded."""
        if self._hopeless:
            raise TooManyFailuresError(self._hopeless)

    def _fail(self, number: int, failed: Failed) -> None:
        run = self._running[number]
        store.fail(
            self.study,
            run.trial,
            failed.reason,
            retry=failed.retry,
            save_memory=failed.out_of_memory,
        )
        del self._running[number]
        self._news.append(Ended(run.job, run.label, "FAIL", None, run.seconds, failed.reason))

    def _interrupt(self, number: int, reason: str) -> None:
        """End a trial for a reason that lies outside it; its allocation waits for the next run."""
        run = self._running[number]
        store.interrupt(self.study, run.trial, reason)
        del self._running[number]
        self._news.append(Ended(run.job, run.label, "FAIL", None, run.seconds, reason))


def _as_elsewhere(ended: Ended, trial: FrozenTrial) -> Ended:
    """Say of a trial's end what another program has made of it."""
    why = "another program ended it"
    return replace(ended, state=trial.state.name, objective=trial.value, reason=why)


def _not_finite(event: Event) -> str | None:
    """Name the number of an event that is none, or infinite."""
    if isinstance(event, Step):
        numbers = {"training loss": event.loss}
    else:
        numbers = {"objective": event.objective, "accuracy": event.accuracy}
    return next((name for name, value in numbers.items() if not math.isfinite(value)), None)
