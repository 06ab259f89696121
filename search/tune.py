"""Offer a study's sampler to people who drive their own Ray Tune `Tuner`.

`BudgetSearcher` is a Ray Tune search algorithm over an Optuna study: Tune decides what runs where
and when it stops, the study holds everything that is known. One of two files that import Ray.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import ray.util.client
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from ray.tune.search import Searcher

from mola.allocation import Allocation, ExpertBudget
from search.priors.named import named_allocations
from search.sampler import BudgetSampler, remaining
from search.sampler.history import all_trials, allocation_of, read_history
from search.sampler.joint import BudgetExhausted
from search.shared_claim import share_claim
from studies import encoding
from studies.records import (
    BLAMELESS_ATTR,
    LABEL_ATTR,
    PRIOR,
    REASON_ATTR,
    RESULT_ATTRS,
    SEARCH,
    SEED_ATTR,
    SPEC_ATTR,
    study_spec,
)

TRAINING_ITERATION = "training_iteration"  # Tune's key of the number of results so far
TUNE_ATTR = "tune_trial_id"  # attribute of a trial: what Tune calls it
_MODES = {"min": StudyDirection.MINIMIZE, "max": StudyDirection.MAXIMIZE}
_log = logging.getLogger(__name__)


class BudgetSearcher(Searcher):
    """Suggest allocations of a budget to Ray Tune, and record in a study what becomes of them.

    A trial's config is `{"experts": [...], "seed": n}`: experts per layer, as `MolaConfig` takes
    them, and the seed of the fine-tune. Each result that Tune reports is an intermediate value of
    the Optuna trial. A trial that ends by itself or reaches `max_t` is COMPLETE; one that a
    scheduler or a stop criterion ends before is PRUNED, with its last value; one that fails, or
    whose metric is not a finite number, is FAIL, with the reason.

    The study is the only memory. `save` writes nothing that `restore` would need, so a `Tuner` that
    is restored, or a new one over the same study, goes on from what the study holds. A new searcher
    ends what a killed one left running, and enqueues it again; a restored one does not, because
    Tune may go on with it.

    One process at a time may work on a study in a database: the searcher and its copies hold it, as
    `search.run` does, until the last of them is gone. In the process itself a new searcher takes
    over from an older one. With a Ray client the cluster's process holds it, where the `Tuner` is.

    Example:
        >>> searcher = BudgetSearcher(  # doctest: +SKIP
        ...     "mine",
        ...     ExpertBudget(32, 160),
        ...     storage="sqlite:///study.db",
        ...     metric="loss",
        ...     mode="min",
        ... )

    Args:
        study: A study, or the name of one in `storage`, which is made if it is missing.
        budget: The allowed allocations.
        metric: Key of the objective in the results.
        mode: `min` or `max`; the study's direction.
        storage: Optuna storage or URL, where `study` is a name.
        max_t: `training_iteration` of a whole trial: that of the scheduler, if it has one. Without
            it, whatever ends a trial from outside prunes it.
        seed: Of the sampler, and of the fine-tunes; that of the study, if `search.run` made it.
        warm_start: Allocations to begin with, each once, and believed to be good; None begins with
            the named shapes, and believes nothing.

    Raises:
        ValueError: The study has another direction or is about another budget, or a warm start is
            not in the budget; or another process works on the study.
    """

    def __init__(
        self,
        study: optuna.Study | str,
        budget: ExpertBudget,
        *,
        metric: str,
        mode: str,
        storage: str | optuna.storages.BaseStorage | None = None,
        max_t: int | None = None,
        seed: int = 0,
        warm_start: Sequence[Allocation] | None = None,
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode must be 'min' or 'max', got {mode!r}")
        super().__init__(metric=metric, mode=mode)
        self.budget = budget
        self.max_t = max_t
        self._distributions = encoding.distributions(budget)
        self._seen: dict[str, int] = {}  # the last step that was told of, by Tune's trial
        self._study = _open(study, storage, mode)
        self._seed = seed
        if SPEC_ATTR in self._study.user_attrs:
            spec = study_spec(self._study)
            if spec.budget != budget:
                raise ValueError(
                    f"the study {self._study.study_name!r} is about {spec.budget}, not {budget}"
                )
            self._seed = spec.seed
        self._claim = share_claim(self._study)
        self._study.sampler = BudgetSampler(budget, seed=self._seed, priors=warm_start or ())
        self._reclaim()
        self._enqueue(tuple(named_allocations(budget)) if warm_start is None else warm_start)
        if ray.util.client.ray.is_connected():  # type: ignore[no-untyped-call]
            self._claim = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the claim, which is this process's."""
        return {key: value for key, value in vars(self).items() if key != "_claim"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, or what a restored `Tuner` goes on with.

        Raises:
            ValueError: Another process works on the study.
        """
        vars(self).update(state)
        self._claim = share_claim(self._study)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        """Give the next allocation, or say that none is left.

        Raises:
            ClaimLostError: Another process has taken the study over, as after a long sleep.
        """
        if self._claim is not None:
            self._claim.check()
        study = self._study
        while True:
            waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if not waiting and remaining(study, self.budget) == 0:
                return str(Searcher.FINISHED)
            try:
                trial = study.ask()
                for name, range_ in self._distributions.items():
                    trial.suggest_int(name, range_.low, range_.high)
                allocation = encoding.from_params(trial.params)
                if allocation not in self.budget:
                    raise ValueError(f"{allocation} is not in the budget")
            except (BudgetExhausted, ValueError) as error:
                refused = self._last_running()
                self._fail(refused, str(error))
                if "fixed_params" not in refused.system_attrs:
                    raise
                continue  # it was what somebody else enqueued
            seed = int(trial.user_attrs.get(SEED_ATTR, self._seed))
            trial.set_user_attr(TUNE_ATTR, trial_id)
            trial.set_user_attr(SEED_ATTR, seed)
            trial.set_user_attr(LABEL_ATTR, trial.user_attrs.get(LABEL_ATTR, SEARCH))
            return {"experts": list(allocation.experts), "seed": seed}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Record an intermediate value, once per step."""
        trial = self._running(trial_id)
        if trial is not None:
            self._report(trial, result)
            self._seen[trial_id] = int(result[TRAINING_ITERATION])

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Record how a trial ended; what comes after its end is ignored."""
        trial = self._running(trial_id)
        if trial is None:
            return
        value = (result or {}).get(self.metric)
        if error:
            self._fail(trial, "the trial failed in Tune")
        elif result is None:
            self._fail(trial, "Tune ended the trial before its result", blameless=True)
        elif not isinstance(value, (int, float)) or not math.isfinite(value):
            self._fail(trial, f"{self.metric} is {value!r:.40}, expected a finite number")
        elif self._is_whole(trial_id, result):
            self._complete(trial, result, float(value))
        else:
            self._report(trial, result)
            self._study.tell(trial.number, state=TrialState.PRUNED)

    def save(self, checkpoint_path: str) -> None:
        """Write a file, because Tune looks for one; the state is the study."""
        Path(checkpoint_path).write_text(f"{self._study.study_name}\n", encoding="utf-8")

    def restore(self, checkpoint_path: str) -> None:
        """Go on from the study alone.

        Raises:
            ValueError: the study was in memory and is lost.
        """
        self._seen = {}  # a trial that goes on may report the same steps again
        if isinstance(self._study._storage, InMemoryStorage):
            raise ValueError(
                "the study was in memory, so nothing can be restored; give BudgetSearcher a "
                "storage, such as sqlite:///study.db"
            )

    def _is_whole(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Tell a trial that ran to its end from one that was stopped.

        Tune tells the searcher of each result before the trial goes on, but not of the one with
        which it is stopped: a last result that is known already means that the trial ended itself.
        """
        step = int(result[TRAINING_ITERATION])
        if self.max_t is not None and step >= self.max_t:
            return True
        return self._seen.get(trial_id) == step

    def _complete(self, trial: FrozenTrial, result: dict[str, Any], value: float) -> None:
        """End a trial with its result; one of a study of `search.run` needs an accuracy."""
        attrs = {key: result[key] for key in RESULT_ATTRS if key in result}
        if SPEC_ATTR in self._study.user_attrs and not _is_finite(attrs.get("accuracy")):
            self._fail(trial, "the result has no accuracy, which a study of search.run needs")
            return
        for key, attr in attrs.items():
            self._study._storage.set_trial_user_attr(trial._trial_id, key, attr)
        self._study.tell(trial.number, value)

    def _report(self, trial: FrozenTrial, result: dict[str, Any]) -> None:
        value, step = result.get(self.metric), int(result[TRAINING_ITERATION])
        if value is not None and _is_finite(value) and step not in trial.intermediate_values:
            self._study._storage.set_trial_intermediate_value(trial._trial_id, step, float(value))

    def _fail(self, trial: FrozenTrial, reason: str, *, blameless: bool = False) -> None:
        _log.warning("trial %d failed: %s", trial.number, reason)
        attrs: dict[str, Any] = {REASON_ATTR: reason}
        if blameless:
            attrs[BLAMELESS_ATTR] = True
        for key, attr in attrs.items():
            self._study._storage.set_trial_user_attr(trial._trial_id, key, attr)
        self._study.tell(trial.number, state=TrialState.FAIL)

    def _running(self, trial_id: str) -> FrozenTrial | None:
        """Find the trial that Tune calls so, if it is not over; a restored Tuner knows it, too."""
        for trial in all_trials(self._study):
            if trial.user_attrs.get(TUNE_ATTR) == trial_id and trial.state == TrialState.RUNNING:
                return trial
        return None

    def _last_running(self) -> FrozenTrial:
        """Find the trial that was asked for a moment ago."""
        return max(
            (t for t in all_trials(self._study) if t.state == TrialState.RUNNING),
            key=lambda t: t.number,
        )

    def _reclaim(self) -> None:
        """End the trials that a killed searcher left running, and enqueue each of them again."""
        for trial in all_trials(self._study):
            if TUNE_ATTR not in trial.user_attrs or trial.state != TrialState.RUNNING:
                continue
            allocation = allocation_of(trial, self.budget)
            if allocation is not None:
                kept = {k: trial.user_attrs[k] for k in (LABEL_ATTR, SEED_ATTR)}
                self._study.enqueue_trial(encoding.to_params(allocation), user_attrs=kept)
            self._fail(trial, "Tune was stopped", blameless=True)

    def _enqueue(self, allocations: Sequence[Allocation]) -> None:
        """Enqueue each allocation that no trial has tried and none will."""
        names = named_allocations(self.budget)
        trials = all_trials(self._study)
        taken = set(read_history(trials, self.budget, self._study.direction).taken)
        for allocation in allocations:
            if allocation not in self.budget:
                raise ValueError(f"the warm start {allocation} is not in {self.budget}")
            if allocation not in taken:
                own = f"{PRIOR}warm start"
                label = f"named {','.join(names[allocation])}" if allocation in names else own
                attrs = {LABEL_ATTR: label, SEED_ATTR: self._seed}
                self._study.enqueue_trial(encoding.to_params(allocation), user_attrs=attrs)
                taken.add(allocation)


def _open(
    study: optuna.Study | str, storage: str | optuna.storages.BaseStorage | None, mode: str
) -> optuna.Study:
    """Open or make the study, and check its direction."""
    if isinstance(study, str):
        if storage is None:
            raise ValueError(f"say by storage where the study {study!r} is, such as sqlite:///x.db")
        study = optuna.create_study(
            study_name=study, storage=storage, direction=_MODES[mode], load_if_exists=True
        )
    if study.directions != [_MODES[mode]]:
        directions = ", ".join(d.name.lower() for d in study.directions)
        raise ValueError(f"mode={mode!r}, but the study {study.study_name!r} is to {directions}")
    return study


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
