"""Proposals for many workers with short trials: several from one model, so that nobody waits.

A model takes a good part of a second. With 64 workers and trials of a second, one per trial would
leave the workers idle nine tenths of their time. What a single result adds is little where dozens
are on their way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
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
_GROWTH = 1.1  # of the finished allocations, before the variances are learnt again
_ALIKE = 0.9  # cosine of two contrasts that tell the same


@dataclass(frozen=True)
class Learnt:
    """Variances, and after how many finished allocations they were learnt."""

    variances: Variances
    finished: int


def results_per_model(workers: int, seconds: float) -> int:
    """Say how many results may come before a new model is made, 1 to the number of workers.

    Args:
        workers: that run trials.
        seconds: usual wall clock of a trial.
    """
    if workers < _MANY:
        return 1
    return min(workers, max(1, math.ceil(_MODEL_SECONDS * workers / max(seconds, 1e-3))))


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
        observations, count = history.observations, _finished(history)
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

    def serves(self, among: ExpertBudget, history: History, share: int) -> bool:
        """Say whether it is still good enough, if so many results may be missing."""
        fresh = 0 <= _finished(history) - self._made_with < share
        return fresh and among == self._among and all(self._ranked.values())

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
