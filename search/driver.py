"""Drive a search: ask the study what comes next, keep the pool busy, record what happened.

Free of Ray and torch: the workers stand behind `Pool`. The study is the only memory, so a driver
that was killed is followed by one that goes on from the study alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.trial import TrialState

from mola.allocation import Allocation
from mola.events import Event, Finished, Rung, Step
from search.conclude import CONFIDENCE, candidates, conclude, fresh_seeds, measured
from search.deadline import Deadline
from search.patience import outlook
from search.priors.given import Prior
from search.priors.named import named, named_allocations
from search.race import BLOCKS, still_racing
from search.sampler import BudgetExhausted, posterior_means
from search.updates import Ended, Note, Phase, Progress, Started, Update
from search.workers.clock import AwakeClock
from search.workers.pool import Failed, Job, Memory, Pool, PoolError
from studies import encoding, store
from studies.patient import StoreError
from studies.records import LABEL_ATTR, PRIOR, SAVE_MEMORY_ATTR
from studies.spec import StudySpec

POLL_SECONDS = 0.5
"""Longest wait for an event, and so the longest that a request to stop goes unnoticed."""


class StopRequestedError(RuntimeError):
    """A stop was requested."""


class TooManyFailuresError(RuntimeError):
    """So many trials failed in a row that the next would, too."""


@dataclass(frozen=True)
class Rules:
    """How far a search goes.

    Attributes:
        trials: Distinct allocations to be measured or pruned, named ones and priors included.
        finalists: The best so many allocations are run again on fresh seeds.
        confirm_seeds: Number of fresh seeds; 0 leaves the winner unconfirmed.
        max_failures: The search stops after so many failures in a row.
        trial_timeout: Seconds that a trial may take; None: see `search.deadline`.
        stop_early: The search proposes no more once nothing is left to gain (`search.patience`).
    """

    trials: int
    finalists: int = 3
    confirm_seeds: int = 3
    max_failures: int = 5
    trial_timeout: float | None = None
    stop_early: bool = False


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


class Driver:
    """The loop between a study and a pool.

    Args:
        study: its sampler proposes allocations of `spec.budget`, its pruner judges rungs.
        spec: what the study is about.
        open_pool: starts the workers; called only if there is something to run.
        rules: how far to go.
        priors: allocations that run after the named ones, before the sampler proposes any.
        notify: told of everything that happens, for display.
        stop_requested: asked between events; True ends the search.

    Attributes:
        goal: Distinct allocations to be measured, at most as many as the budget has.
        started: Trials that this driver started.
        settled: Whether it stopped early, as nothing was left to gain.
    """

    def __init__(
        self,
        study: optuna.Study,
        spec: StudySpec,
        open_pool: Callable[[], Pool],
        rules: Rules,
        *,
        priors: Sequence[Prior] = (),
        notify: Callable[[Update], None] = lambda update: None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.study = study
        self.spec = spec
        self.rules = rules
        self.priors = priors
        self.goal = min(rules.trials, spec.budget.size())
        self.started = 0
        self.settled = False
        self.notify = notify
        self.stop_requested = stop_requested
        self._open_pool = open_pool
        self._pool: Pool | None = None
        self._clock = AwakeClock()
        self._deadline = Deadline(rules.trial_timeout)
        self._running: dict[int, _Run] = {}
        self._done: set[Allocation] = set()
        self._failures = 0
        self._exhausted = False
        self._judged = 0  # allocations that were measured when an early stop was last considered
        self._to_come = 0  # replicates of the seeds that are not yet enqueued, at most
        self._distributions = encoding.distributions(spec.budget)

    def run(self) -> dict[str, Any]:
        """Search, confirm and conclude, from wherever the study stands.

        Returns:
            The conclusion, which is also recorded in the study.

        Raises:
            StopRequestedError: a stop was requested.
            TooManyFailuresError: trials failed `max_failures` times in a row.
            PoolError: no worker can be started.
            StoreError: the store is out of reach for good.
        """
        try:
            self._prepare()
            self._work(propose=True)
            self._confirm()
            return self._conclude()
        except (StopRequestedError, TooManyFailuresError, PoolError) as error:
            # Where the store is out of reach, the next run finds them running, and does the same.
            with suppress(StoreError, StopRequestedError):
                for number in list(self._running):
                    self._interrupt(number, str(error))
            raise
        finally:
            if self._pool is not None:
                self._pool.close()

    def _prepare(self) -> None:
        """Put right what a killed driver left; enqueue the named allocations and the priors."""
        lost = store.reconcile(self.study)
        if lost:
            trials = "1 trial" if lost == 1 else f"{lost} trials"
            self.notify(Note(f"left unfinished by an earlier run, to start again: {trials}"))
        history = store.records(self.study)
        for record in history:
            self._deadline.learn((record.train_seconds or 0.0) + (record.eval_seconds or 0.0))
        self._done = {
            record.allocation
            for record in history
            if record.state in ("COMPLETE", "PRUNED") and record.label != store.REPLICATE
        }
        if self.goal < self.rules.trials:
            allowed = "one allocation" if self.goal == 1 else f"{self.goal} allocations"
            self.notify(Note(f"the budget and its bounds allow {allowed}, no more"))
        named = named_allocations(self.spec.budget)
        for allocation, names in named.items():
            self._enqueue_first(allocation, f"named {','.join(names)}")
        for prior in self.priors:
            if prior.allocation in named and prior.name not in named[prior.allocation]:
                same = ", ".join(named[prior.allocation])
                self.notify(Note(f"the prior {prior.name} is the same allocation as {same}"))
            self._enqueue_first(prior.allocation, f"{PRIOR}{prior.name}")

    def _enqueue_first(self, allocation: Allocation, label: str) -> None:
        """Enqueue an allocation that the search begins with, unless it is under way or done."""
        waiting = self._waiting()
        if allocation in self._done or any(allocation == r.allocation for r in waiting):
            return
        if self._room(waiting) <= 0:
            left_out = label.partition(" ")[2].replace(",", ", ")
            self.notify(Note(f"--trials {self.rules.trials} leaves no room for {left_out}"))
            return
        store.enqueue(self.study, allocation, label=label, seed=self.spec.seed)

    def _room(self, waiting: list[store.TrialRecord]) -> int:
        """Count the allocations that may still be proposed; those under way are taken."""
        if self._exhausted or self._nothing_to_gain():
            return 0
        under_way = [(run.label, run.job.allocation) for run in self._running.values()]
        under_way += [(record.label, record.allocation) for record in waiting]
        taken = {allocation for label, allocation in under_way if label != store.REPLICATE}
        return self.goal - len(self._done) - len(taken - self._done)

    def _nothing_to_gain(self) -> bool:
        """Judge, once per measured allocation, whether to stop early."""
        if self.rules.stop_early and not self.settled and self._judged < len(self._done):
            self._judged = len(self._done)
            found = outlook(self.study, self.spec.budget, max(1, self.rules.confirm_seeds))
            if found is not None and found.settled:
                self.settled = True
                self.notify(
                    Note(
                        f"stops after {len(self._done)} allocations: the best one left would gain "
                        f"{found.gain:.4f}, and the confirmation resolves {found.resolution:.4f}"
                    )
                )
        return self.settled

    def _waiting(self) -> list[store.TrialRecord]:
        """Read which trials are enqueued, by whomever."""
        if not self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return []
        return [r for r in store.records(self.study) if r.state == "WAITING"]

    def _due(self, propose: bool) -> bool:
        """Whether another trial should start."""
        waiting = self._waiting()
        return bool(waiting) or (propose and self._room(waiting) > 0)

    def _work(self, propose: bool, *, announce: bool = True) -> None:
        """Run trials until none is due: those that wait, and fresh proposals if so told."""
        if self._pool is None and self._due(propose):
            self._pool = self._open_pool()
        pool = self._pool
        if announce:
            self._announce(propose)
        events: list[tuple[int, Event | Failed | Memory]] = []
        while pool is not None and (events or self._running or self._due(propose)):
            # What a worker is to do next comes after what it has done, in the same transaction.
            with store.at_once(self.study):
                for number, event in events:
                    self._handle(pool, number, event)
                self._end_overdue(pool)
                if self.stop_requested():
                    raise StopRequestedError("stopped by the user")
                while pool.idle and self._due(propose):
                    self._start_next(pool)
            events = pool.poll(POLL_SECONDS) if self._running or self._due(propose) else []

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
        enqueued = {record.number: record.allocation for record in self._waiting()}
        trial = self.study.ask()
        try:
            allocation = enqueued.get(trial.number) or encoding.from_params(trial.relative_params)
        except BudgetExhausted as error:
            self._exhausted = True
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
            self.started += 1
            pool.start(job)
        store.mark(trial, label=label, seed=seed)
        for name, range_ in self._distributions.items():
            trial.suggest_int(name, range_.low, range_.high)
        self.notify(Started(job, label))
        if not fits or encoding.from_params(trial.params) != allocation:
            pool.stop(job.number)
            self._fail(job.number, Failed(f"{allocation} is not in the budget", retry=False))

    def _refuse(self, trial: optuna.Trial, reason: str) -> None:
        """End a trial that was asked for and cannot run."""
        store.fail(self.study, trial, reason, retry=False)
        self.notify(Note(reason))

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
            self.notify(Progress(number, event))
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
            self.notify(Progress(number, event))

    def _judge(self, pool: Pool, run: _Run, rung: Rung) -> None:
        """Record a rung once, and let the trial go on or prune it."""
        number = run.job.number
        if rung.step not in run.rungs:
            run.rungs[rung.step] = rung.objective
            run.trial.report(rung.objective, rung.step)
            self.notify(Progress(number, rung))
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
            self._done.add(run.job.allocation)
        self.notify(Ended(run.job, run.label, state, objective, run.seconds))

    def _count_failure(self, number: int, failed: Failed) -> None:
        self._fail(number, failed)
        self._strike(failed.reason)

    def _strike(self, reason: str) -> None:
        self._failures += 1
        if self._failures >= self.rules.max_failures:
            raise TooManyFailuresError(
                f"{self._failures} trials failed in a row, the last one: {reason}"
            )

    def _fail(self, number: int, failed: Failed) -> None:
        run = self._running.pop(number)
        store.fail(
            self.study,
            run.trial,
            failed.reason,
            retry=failed.retry,
            save_memory=failed.out_of_memory,
        )
        self.notify(Ended(run.job, run.label, "FAIL", None, run.seconds, failed.reason))

    def _interrupt(self, number: int, reason: str) -> None:
        """End a trial for a reason that lies outside it; its allocation waits for the next run."""
        run = self._running.pop(number)
        store.interrupt(self.study, run.trial, reason)
        self.notify(Ended(run.job, run.label, "FAIL", None, run.seconds, reason))

    def _confirm(self) -> None:
        """Run the finalists and the named allocations on fresh seeds; those done stay done.

        Seed by seed, so that an interrupted confirmation has complete blocks to compare, and who is
        clearly behind after some of them does not run on the rest (`search.race`).
        """
        records = store.records(self.study)
        # without the replicates, so that their results do not change who is confirmed
        searched = [
            trial
            for trial in self.study.get_trials(deepcopy=False)
            if trial.user_attrs.get(LABEL_ATTR) != store.REPLICATE
        ]
        estimates = posterior_means(self.study, self.spec.budget, searched)
        field = candidates(records, self.spec, self.rules.finalists, estimates)
        seeds = fresh_seeds(self.spec, self.rules.confirm_seeds)
        uniform = named("5555", self.spec.budget)
        raced = len(field)
        for place, seed in enumerate(seeds):
            values = measured(store.records(self.study))
            racing = still_racing(values, field, seeds[:place], uniform, CONFIDENCE)
            for allocation in racing:
                store.enqueue(self.study, allocation, label=store.REPLICATE, seed=seed)
            self._to_come = len(racing) * (len(seeds) - place - 1)
            if place + 1 < min(BLOCKS, len(seeds)):
                continue
            news = place + 1 == min(BLOCKS, len(seeds)) or len(racing) < raced
            self._work(propose=False, announce=news)
            raced = len(racing)

    def _conclude(self) -> dict[str, Any]:
        """Name the winner and say what is known about it."""
        conclusion = conclude(
            store.records(self.study), self.spec, confirm_seeds=self.rules.confirm_seeds
        )
        store.set_conclusion(self.study, conclusion)
        return conclusion

    def _announce(self, propose: bool) -> None:
        """Tell the listeners which phase begins and how much of it is done."""
        workers = self._pool.size if self._pool is not None else 0
        if propose:
            self.notify(Phase("search", len(self._done), self.goal, workers))
        else:
            replicates = [r for r in store.records(self.study) if r.label == store.REPLICATE]
            done = sum(r.state == "COMPLETE" for r in replicates)
            open_ = sum(r.state in ("WAITING", "RUNNING") for r in replicates)
            self.notify(Phase("confirmation", done, done + open_ + self._to_come, workers))


def _not_finite(event: Event) -> str | None:
    """Name the number of an event that is none, or infinite."""
    if isinstance(event, Step):
        numbers = {"training loss": event.loss}
    else:
        numbers = {"objective": event.objective, "accuracy": event.accuracy}
    return next((name for name, value in numbers.items() if not math.isfinite(value)), None)
