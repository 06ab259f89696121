"""Drive a search: decide which trials are due, from the first named allocation to the conclusion.

`search.trials` runs them. The study is the only memory, so a driver that was killed is followed by
one that goes on from the study alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.exceptions import OptunaError

from mola.allocation import Allocation
from search.conclude import (
    CONFIDENCE,
    candidates,
    conclude,
    fresh_seeds,
    measured,
)
from search.deadline import Deadline
from search.patience import outlook
from search.pilot import Pilot
from search.priors.given import Prior
from search.priors.named import named, named_allocations
from search.race import BLOCKS, still_racing
from search.sampler import posterior_means
from search.trials import StopRequestedError, TooManyFailuresError, TrialLoop
from search.updates import Note, Phase, Update
from search.workers.pool import Pool, PoolError
from studies import store
from studies.patient import StoreError
from studies.records import LABEL_ATTR, NAMED, PRIOR, ForeignDataError
from studies.spec import StudySpec


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


class Driver:
    """A search from wherever its study stands to its conclusion.

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
        settled: Whether it stopped early, as nothing was left to gain.
        trials: Those that run, and what they have done.
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
        self.settled = False
        self.notify = notify
        self.trials = TrialLoop(
            study,
            spec,
            open_pool,
            max_failures=rules.max_failures,
            deadline=Deadline(rules.trial_timeout),
            notify=self._hear,
            stop_requested=stop_requested,
        )
        self._pilot = Pilot(
            study,
            spec,
            finalists=rules.finalists,
            confirm_seeds=rules.confirm_seeds,
            notify=notify,
        )
        self._judged = 0  # allocations that were measured when an early stop was last considered
        self._to_come = 0  # replicates of the seeds that are not yet enqueued, at most

    def run(self) -> dict[str, Any]:
        """Search, confirm and conclude, from wherever the study stands.

        Returns:
            The conclusion, which is also recorded in the study.

        Raises:
            StopRequestedError: a stop was requested.
            TooManyFailuresError: trials failed `max_failures` times in a row.
            PoolError: no worker can be started.
            StoreError: the store is out of reach for good.
            ForeignDataError: another program wrote to the study what cannot be understood.
        """
        try:
            self._prepare()
            self._work(propose=True)
            self._confirm()
            return self._conclude()
        except (StopRequestedError, TooManyFailuresError, PoolError) as error:
            # What cannot be written now the next run finds running, and does the same.
            with suppress(StoreError, ForeignDataError, OptunaError, StopRequestedError):
                self.trials.interrupt_all(str(error))
            raise
        finally:
            self.trials.close()

    def _prepare(self) -> None:
        """Put right what a killed driver left; enqueue the named allocations and the priors."""
        lost = store.reconcile(self.study)
        if lost:
            trials = "1 trial" if lost == 1 else f"{lost} trials"
            self.notify(Note(f"left unfinished by an earlier run, to start again: {trials}"))
        self._withdraw_replicates()
        self.trials.recall()
        if self.goal < self.rules.trials:
            allowed = "one allocation" if self.goal == 1 else f"{self.goal} allocations"
            self.notify(Note(f"the budget and its bounds allow {allowed}, no more"))
        named = named_allocations(self.spec.budget)
        for allocation, names in named.items():
            self._enqueue_first(allocation, f"{NAMED}{','.join(names)}")
        for prior in self.priors:
            if prior.allocation in named and prior.name not in named[prior.allocation]:
                same = ", ".join(named[prior.allocation])
                self.notify(Note(f"the prior {prior.name} is the same allocation as {same}"))
            self._enqueue_first(prior.allocation, f"{PRIOR}{prior.name}")
        self._pilot.begin()

    def _withdraw_replicates(self) -> None:
        """Take back what an earlier run wanted on fresh seeds that this one does not ask for."""
        seeds = fresh_seeds(self.spec, self.rules.confirm_seeds)
        for record in self.trials.waiting():
            if record.label == store.REPLICATE and record.seed not in seeds:
                store.withdraw(self.study, record.number, "fewer --confirm-seeds")

    def _enqueue_first(self, allocation: Allocation, label: str) -> None:
        """Enqueue an allocation that the search begins with, unless it is under way or done."""
        waiting = self.trials.waiting()
        if allocation in self.trials.done or any(allocation == r.allocation for r in waiting):
            return
        if self._room(waiting) <= 0:
            left_out = label.partition(" ")[2].replace(",", ", ")
            room = f"--trials {self.rules.trials} leaves no room for the allocation {left_out}"
            self.notify(Note(room))
            return
        store.enqueue(self.study, allocation, label=label, seed=self.spec.seed)

    def _hear(self, update: Update) -> None:
        self.notify(update)
        self._pilot.hear(update)

    def _room(self, waiting: list[store.TrialRecord]) -> int:
        """Count the allocations that may still be proposed; those under way are taken."""
        if self.trials.exhausted or self._nothing_to_gain():
            return 0
        done, under_way = self.trials.done, self.trials.under_way
        under_way += [(record.label, record.allocation) for record in waiting]
        taken = {allocation for label, allocation in under_way if label != store.REPLICATE}
        return self.goal - len(done) - len(taken - done)

    def _nothing_to_gain(self) -> bool:
        """Judge, once per measured allocation, whether to stop early."""
        measured = len(self.trials.done)
        if self.rules.stop_early and not self.settled and self._judged < measured:
            self._judged = measured
            found = outlook(self.study, self.spec.budget, max(1, self.rules.confirm_seeds))
            if found is not None and found.settled:
                self.settled = True
                self.notify(
                    Note(
                        f"stops after {measured} allocations: the best one left would gain "
                        f"{found.gain:.4f}, and the confirmation resolves {found.resolution:.4f}"
                    )
                )
        return self.settled

    def _due(self, propose: bool) -> bool:
        """Whether another trial should start."""
        waiting = self.trials.waiting()
        return bool(waiting) or (propose and self._room(waiting) > 0)

    def _work(self, propose: bool, *, announce: bool = True) -> None:
        """Run trials until none is due: those that wait, and fresh proposals if so told."""
        if self._due(propose):
            self.trials.open()
        if announce:
            self._announce(propose)
        self.trials.run(lambda: self._due(propose))

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
            so_far, ahead = seeds[: place + 1], racing
            if all(set(so_far) <= set(values[a]) for a in racing):  # as in a run that goes on
                ahead = still_racing(values, field, so_far, uniform, CONFIDENCE)
            later = [(a, seed) for a in ahead for seed in seeds[place + 1 :]]
            self._to_come = sum(seed not in values[a] for a, seed in later)
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
        workers = self.trials.workers
        if propose:
            self.notify(Phase("search", len(self.trials.done), self.goal, workers))
        else:
            replicates = [r for r in store.records(self.study) if r.label == store.REPLICATE]
            done = sum(r.state == "COMPLETE" for r in replicates)
            open_ = sum(r.state in ("WAITING", "RUNNING") for r in replicates)
            self.notify(Phase("confirmation", done, done + open_ + self._to_come, workers))
