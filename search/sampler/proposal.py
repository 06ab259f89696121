"""Choose the next allocation to try, from what has been measured.

Two kinds of trials take turns. An attempt is the allocation that promises most. A contrast moves
experts from half of the layers to the other half, boldly or less so; it is seldom good itself, but
tells about many layers at once. Which allocations could be the best is known from draws of the
posterior, each with its own optimum; the contrast that is chosen tells most about what they would
gain. So boldness follows from the data: where each layer's weight is in doubt the boldest contrasts
tell most, and where weights are known but not the curve of their returns, less bold ones.

Notation: L layers, M candidates; counts are [L] or [M, L] integers.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mola.allocation import Allocation, ExpertBudget
from search.sampler.features import FeatureMap
from search.sampler.moves import Floats, Ints, Space, best_additive
from search.sampler.observations import Observations
from search.sampler.surrogate import Posterior, fit

_ENOUGH = 3  # observations before there is a model
_ATTEMPT_EVERY = 6  # until each layer has had its share of contrasts
_LATER_ATTEMPT_EVERY = 2
_SHARE = 2  # trials per layer
_OPTIMISM = 0.3  # standard deviations taken off an attempt's mean
_BOLDNESS = (0.25, 0.5, 1.0)  # of contrasts around the best, on the scale of log n
_WALSH_ROWS = 48
_RANDOM_ROWS = 24
_DRAWS = 32  # of the posterior


def propose(
    among: ExpertBudget,
    features: FeatureMap,
    observations: Observations,
    pending: Collection[Allocation],
    taken: Collection[Allocation],
    rng: np.random.Generator,
) -> Allocation:
    """Choose the next allocation.

    Args:
        among: choose from these, the budget or a part of it.
        features: of the budget, whatever part of it `among` is.
        observations: finished trials.
        pending: allocations whose trials are not finished.
        taken: allocations not to be proposed; at least one member of `among` is not in it.
        rng: decides the random part.
    """
    space = Space(among, taken)
    if len(observations.values) < _ENOUGH:
        return space.first_free(_opening(space), rng)
    waiting = np.array([a.experts for a in pending], dtype=np.int64)
    model = fit(features, observations, waiting.reshape(-1, among.num_layers))
    best = best_of(space, model, rng)
    if is_attempt(len(taken), among.num_layers):
        ranked = attempts(space, model, observations, best, rng)
    else:
        ranked = contrasts(space, model, best, rng)
    return space.first_free(ranked, rng)


def best_of(space: Space, model: Posterior, rng: np.random.Generator) -> Ints:
    """Find the allocation [L] that the model believes best."""
    additive = best_additive(model.tables(), space.budget, model.features.first)
    return space.descend(model.mean, additive, rng)


def is_attempt(taken: int, layers: int) -> bool:
    """Say whether the trial after so many is an attempt or a contrast."""
    every = _LATER_ATTEMPT_EVERY if taken >= _SHARE * layers else _ATTEMPT_EVERY
    return taken % every == every - 1


def _opening(space: Space) -> Ints:
    """Give uniform and the boldest contrasts, halves of the depth first."""
    budget = space.budget
    mean = np.full((1, budget.num_layers), budget.total / budget.num_layers)
    signs = _walsh(budget.num_layers)
    turns = np.resize([1.0, 1.0, -1.0, -1.0], len(signs))  # each end is rich half of the time
    signs *= turns[:, None]
    return space.rounded(np.concatenate([mean, _boldest(space, signs)]))


def attempts(
    space: Space,
    model: Posterior,
    observations: Observations,
    best: Ints,
    rng: np.random.Generator,
) -> Ints:
    """Rank the surroundings of the best allocations by their optimistic values."""
    tops = [best]
    tried = observations.counts[model.mean(observations.counts).argmin()]
    if Allocation(tried.tolist()) in space.budget:
        tops.append(space.descend(model.mean, tried, rng))
    near = [space.moves(top, rng) for top in tops]
    counts = np.unique(np.concatenate([np.stack(tops), *near]), axis=0)
    mean, deviation = model.mean_and_deviation(counts)
    return counts[np.argsort(mean - _OPTIMISM * deviation, kind="stable")]


def contrasts(space: Space, model: Posterior, best: Ints, rng: np.random.Generator) -> Ints:
    """Rank contrasts by what they tell about what the possible optima gain over the best."""
    layers = space.budget.num_layers
    walsh = _walsh(layers)
    if len(walsh) > _WALSH_ROWS:
        walsh = walsh[rng.choice(len(walsh), _WALSH_ROWS, replace=False)]
    half = np.where(np.arange(layers) % 2 == 0, 1.0, -1.0)
    chance = [rng.permutation(half)[None] for _ in range(_RANDOM_ROWS)]
    signs = np.concatenate([walsh, -walsh, *chance])
    wanted = [(best + 0.5) * np.exp(bold * signs) for bold in _BOLDNESS]
    counts = np.unique(space.rounded(np.concatenate([_boldest(space, signs), *wanted])), axis=0)
    optima = best_additive(model.samples(_DRAWS, rng), space.budget, model.features.first)
    return counts[np.argsort(-model.gain(counts, best, optima), kind="stable")]


def _boldest(space: Space, signs: Floats) -> Floats:
    """Give layers with a positive sign all they may have, the others as little, [M, L]."""
    extreme: Floats = np.where(signs > 0, space.highs, space.lows).astype(float)
    return extreme


def _walsh(layers: int) -> Floats:
    """Give balanced signs over the layers, from halves of the depth to every other layer, [M, L].

    Walsh functions, ordered by their number of changes and cut to the depth: any two agree in about
    half of the layers, so that together they separate the layers' effects best.
    """
    walsh = np.ones((1, 1))
    while len(walsh) < layers:
        walsh = np.block([[walsh, walsh], [walsh, -walsh]])
    changes = (np.diff(walsh, axis=1) != 0).sum(axis=1)
    rows: Floats = walsh[np.argsort(changes, kind="stable")][1:, :layers]
    return rows
