"""Proposals for many workers with short trials: several from one model, so that nobody waits.

A model takes a good part of a second. With 64 workers and trials of a second, one per trial would
leave the workers idle nine tenths of their time. What a single result adds is little where dozens
are on their way. While a model is made in a thread, the one before it serves on; when they change
places depends on the number of results alone, so that the same results give the same proposals.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mola.allocation import Allocation, ExpertBudget
from search.sampler.evidence import Variances, learn
from search.sampler.features import FeatureMap
from search.sampler.history import History
from search.sampler.moves import Ints, Space
from search.sampler.proposal import attempts, best_of, contrasts, is_attempt
from search.sampler.surrogate import Posterior

_MANY = 16  # workers; with fewer each result is waited for
_MODEL_SECONDS = 1.0  # between two models at least, as far as the trials' usual length tells
_FEWEST = 3  # trials before there is a model, see proposal.py
_NEWS = 0.25  # of the results so far, which a model may lack
_GROWTH = 1.1  # of the finished allocations, before the variances are learnt again
_ALIKE = 0.9  # cosine of two contrasts that tell the same
_MODELS = ThreadPoolExecutor(1, "model")


@dataclass(frozen=True)
class Learnt:
    """Variances, and after how many finished allocations they were learnt."""

    variances: Variances
    finished: int


def results_per_model(workers: int, seconds: float, known: int) -> int:
    """Say how many results may come before a new model is made, 1 to the number of workers.

    Args:
        workers: that run trials.
        seconds: usual wall clock of a trial.
        known: trials at full length so far; each changes the model the more, the fewer there are.
    """
    if workers < _MANY or known < _FEWEST:
        return 1
    in_time = math.ceil(_MODEL_SECONDS * workers / max(seconds, 1e-3))
    return max(1, min(workers, in_time, round(_NEWS * known)))


class Batches:
    """The batch that serves, and the one that is being made.

    Args:
        features: of the budget.
    """

    def __init__(self, features: FeatureMap) -> None:
        self._features = features
        self._serving: Batch | None = None
        self._coming: Future[Batch] | None = None

    def next(
        self, among: ExpertBudget, history: History, share: int, rng: np.random.Generator
    ) -> Allocation:
        """Give the next proposal.

        Args:
            among: choose from these.
            history: of the study; there are observations.
            share: results that a model may lack before the next one is begun; it serves until it
                lacks twice as many.
            rng: decides the random part.
        """
        batch = self._serving
        missing = -1 if batch is None else batch.missing(history)
        if batch is None or missing < 0 or not batch.serves(among):
            self._coming = None
            batch = self._serving = self._make(among, history, rng)
        elif missing >= share:
            if self._coming is None:
                self._coming = _MODELS.submit(self._make, among, history, rng.spawn(1)[0])
            elif missing >= 2 * share:
                batch = self._serving = self._coming.result()
                self._coming = None
        return batch.next(history.taken, rng)

    def _make(self, among: ExpertBudget, history: History, rng: np.random.Generator) -> Batch:
        learnt = None if self._serving is None else self._serving.learnt
        return Batch(among, self._features, history, rng, learnt)


class Batch:
    """Ranked attempts and contrasts of one model.

    Args:
        among: choose from these.
        features: of the budget.
        history: of the study; there are observations.
        rng: decides the random part.
        learnt: variances of an earlier model, used as long as the history has grown little.
    """

    def __init__(
        self,
        among: ExpertBudget,
        features: FeatureMap,
        history: History,
        rng: np.random.Generator,
        learnt: Learnt | None,
    ) -> None:
        observations, count = history.measured.observations, _finished(history)
        if learnt is None or not 0 <= count - learnt.finished < (_GROWTH - 1) * count:
            learnt = Learnt(learn(features, observations), count)
        self.learnt = learnt
        self._among = among
        self._made_with = count
        waiting = np.array([a.experts for a in history.pending], dtype=np.int64)
        waiting = waiting.reshape(-1, among.num_layers)
        model = Posterior(features, observations, learnt.variances, waiting)
        space = Space(among, history.taken)
        best = best_of(space, model, rng)
        near = attempts(space, model, observations, best, rng)
        bold = _spread(contrasts(space, model, best, rng), best)
        self._ranked = {True: deque(near.tolist()), False: deque(bold.tolist())}

    def serves(self, among: ExpertBudget) -> bool:
        """Say whether there is something left for a budget."""
        return among == self._among and all(self._ranked.values())

    def missing(self, history: History) -> int:
        """Count the results that came since it was made; negative if some were taken away."""
        return _finished(history) - self._made_with

    def next(self, taken: Collection[Allocation], rng: np.random.Generator) -> Allocation:
        """Give the next proposal that is free, in turns as `propose` does."""
        ranked = self._ranked[is_attempt(len(taken), self._among.num_layers)]
        while len(ranked) > 1:
            allocation = Allocation(ranked.popleft())
            if allocation not in taken:
                return allocation
        return Space(self._among, taken).first_free(np.array([ranked.popleft()]), rng)


def _finished(history: History) -> int:
    """Count the allocations that are over; of a long history not all are observations."""
    return len(history.taken) - len(set(history.pending))


def _spread(ranked: Ints, best: Ints) -> Ints:
    """Put contrasts that tell the same as a better one behind all others, [M, L].

    Two that move experts between the same layers, in whichever direction, tell the same.
    """
    moved = np.log1p(ranked) - np.log1p(best)
    moved /= np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-12)
    alike = np.abs(moved @ moved.T) > _ALIKE
    chosen: list[int] = []
    for place in range(len(ranked)):
        if not alike[place, chosen].any():
            chosen.append(place)
    rest = np.setdiff1d(np.arange(len(ranked)), chosen)
    order: Ints = np.concatenate([chosen, rest]).astype(np.int64)
    spread: Ints = ranked[order]
    return spread
