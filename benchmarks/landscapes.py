"""Artificial landscapes of different kinds over expert budgets, for benchmarks/sampler.py.

They were made to differ in kind, not to look like any model: additive and smooth over depth,
without depth structure, few layers that matter, alternating layers, blocks with sharp edges, other
diminishing returns than the logarithm, coupled neighbours, two basins, a penalty on thin layers, an
optimum inside the box; 12 to 126 layers.

Held out: the sampler's constants were chosen on the landscapes up to `deep`. The last four, `ends`,
`steps`, `triples` and `tilted`, were run once, when the choice was made.

Notation: M allocations, L layers, V levels (numbers of experts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mola.allocation import ExpertBudget
from search.sampler.moves import Floats, Ints, Space, best_additive

Value = Callable[[Ints], Floats]  # counts [M, L] to values [M], lower is better


@dataclass(frozen=True)
class Landscape:
    """A problem with a known optimum."""

    budget: ExpertBudget
    value: Value
    optimum: Ints  # [L]
    best: float
    uniform: float

    @property
    def gap(self) -> float:
        """What there is to gain over uniform."""
        return self.uniform - self.best


def smooth(layers: int, rng: np.random.Generator, scale: float) -> Floats:
    """Draw a smooth profile over depth with variance 1; the scale is in depths."""
    depth = np.linspace(0, 1, layers)
    covariance = np.exp(-0.5 * ((depth[:, None] - depth) / scale) ** 2)
    root = np.linalg.cholesky(covariance + 1e-8 * np.eye(layers))
    profile: Floats = root @ rng.normal(size=layers)
    return profile


def additive(budget: ExpertBudget, share: Callable[[Floats], Floats]) -> Landscape:
    """Make a landscape that is a sum over layers; share maps counts [V, L] to gains [V, L]."""
    first, last = min(budget.lows), max(budget.highs)
    counts = np.arange(first, last + 1.0)[:, None] * np.ones(budget.num_layers)
    tables = -share(counts).T  # [L, V]
    layers = np.arange(budget.num_layers)
    return landscape(
        budget,
        lambda n: tables[layers, n - first].sum(axis=-1),
        [best_additive(tables, budget, first)],
    )


def landscape(budget: ExpertBudget, value: Value, starts: Sequence[Ints]) -> Landscape:
    """Make a landscape; its optimum is the best that descents from the starts find."""
    space, rng = Space(budget, ()), np.random.default_rng(0)
    mean = budget.total / budget.num_layers
    uniform = np.array(budget.project([mean] * budget.num_layers).experts)
    found = np.array([space.descend(value, start, rng) for start in [*starts, uniform]])
    values = value(found)
    best, even = float(values.min()), float(value(uniform[None])[0])
    return Landscape(budget, value, found[values.argmin()], best, even)


def make_smooth(rng: np.random.Generator) -> Landscape:
    """Weights that change slowly with depth."""
    weights = np.exp(0.7 * smooth(32, rng, 0.25))
    return additive(ExpertBudget(32, 160), lambda n: weights * np.log1p(n))


def make_deep(rng: np.random.Generator) -> Landscape:
    """The same, deeper than any sampler would like."""
    weights = np.exp(0.7 * smooth(126, rng, 0.2))
    return additive(ExpertBudget(126, 630), lambda n: weights * np.log1p(n))


def make_rough(rng: np.random.Generator) -> Landscape:
    """Weights without any depth structure."""
    weights = np.exp(0.8 * rng.normal(size=32))
    return additive(ExpertBudget(32, 160), lambda n: weights * np.log1p(n))


def make_shallow(rng: np.random.Generator) -> Landscape:
    """The same with 12 layers."""
    weights = np.exp(0.8 * rng.normal(size=12))
    return additive(ExpertBudget(12, 60), lambda n: weights * np.log1p(n))


def make_few(rng: np.random.Generator) -> Landscape:
    """Five layers matter, the others hardly."""
    weights = np.full(32, 0.15)
    weights[rng.choice(32, 5, replace=False)] = rng.uniform(1.5, 3, size=5)
    return additive(ExpertBudget(32, 160), lambda n: weights * np.log1p(n))


def make_alternating(rng: np.random.Generator) -> Landscape:
    """Every other layer matters, as where two kinds of attention take turns."""
    weights = np.where(np.arange(32) % 2 == rng.integers(2), 2.0, 0.4)
    weights *= np.exp(0.2 * rng.normal(size=32))
    return additive(ExpertBudget(32, 160), lambda n: weights * np.log1p(n))


def make_blocks(rng: np.random.Generator) -> Landscape:
    """Five blocks of layers with sharp edges; layers may have no experts."""
    edges = np.sort(rng.choice(np.arange(2, 23), 4, replace=False))
    heights = np.exp(0.8 * rng.normal(size=5))
    weights = heights[np.searchsorted(edges, np.arange(24), side="right")]
    return additive(ExpertBudget(24, 96, 0, 8), lambda n: weights * np.log1p(n))


def make_saturating(rng: np.random.Generator) -> Landscape:
    """Layers that saturate at different numbers of experts."""
    weights = np.exp(0.4 * smooth(28, rng, 0.2) + 0.3 * rng.normal(size=28))
    enough = np.exp(1 + 0.5 * rng.normal(size=28))
    return additive(ExpertBudget(28, 140), lambda n: weights * (1 - np.exp(-n / enough)))


def make_mixed(rng: np.random.Generator) -> Landscape:
    """Smooth and rough weights at once, and returns that diminish more slowly."""
    weights = np.exp(0.5 * smooth(48, rng, 0.2) + 0.5 * rng.normal(size=48))
    return additive(ExpertBudget(48, 240, 2, 10), lambda n: weights * np.sqrt(n))


def make_inside(rng: np.random.Generator) -> Landscape:
    """Each layer has a best number of experts, and more harm."""
    wanted = np.clip(4 + 2 * smooth(40, rng, 0.15), 1, 8)
    return additive(ExpertBudget(40, 160, 1, 8), lambda n: -((n - wanted) ** 2))


def make_thin(rng: np.random.Generator) -> Landscape:
    """Smooth weights, and a penalty on layers with fewer than three experts."""
    weights = np.exp(0.6 * smooth(32, rng, 0.2))
    return additive(
        ExpertBudget(32, 160),
        lambda n: weights * np.log1p(n) - 0.5 * np.maximum(3 - n, 0) ** 1.5,
    )


def make_coupled(rng: np.random.Generator) -> Landscape:
    """Neighbours that help each other."""
    budget = ExpertBudget(32, 160)
    weights = np.exp(0.5 * smooth(32, rng, 0.3))
    coupling = rng.uniform(0.2, 1.2, size=31)

    def value(n: Ints) -> Floats:
        log = np.log1p(n)
        pairs = log[:, :-1] * log[:, 1:]
        gain: Floats = log @ weights + 0.5 * pairs @ coupling
        return -gain

    return landscape(budget, value, [np.array(budget.uniform(rng).experts) for _ in range(20)])


def make_basins(rng: np.random.Generator) -> Landscape:
    """Two profiles that exclude each other, one of them better."""
    budget = ExpertBudget(32, 160)
    depth = np.linspace(0, 1, 32)
    centres = np.array([rng.uniform(0.1, 0.4), rng.uniform(0.6, 0.9)])
    weights = 0.3 + 2 * np.exp(-0.5 * ((depth[:, None] - centres) / 0.15) ** 2)  # [L, 2]
    weights[:, 1] *= rng.choice([0.9, 1.1])

    def value(n: Ints) -> Floats:
        both: Floats = np.logaddexp(*(2 * np.log1p(n) @ weights).T) / 2
        return -both

    levels = np.log1p(np.arange(1, 11))
    starts = [best_additive(-np.outer(w, levels), budget, 1) for w in weights.T]
    return landscape(budget, value, starts)


def make_ends(rng: np.random.Generator) -> Landscape:
    """Only the first and the last few layers matter."""
    weights = np.full(32, 0.3) * np.exp(0.3 * rng.normal(size=32))
    weights[: rng.integers(2, 6)] += rng.uniform(1, 2)
    weights[-rng.integers(2, 6) :] += rng.uniform(1, 2)
    return additive(ExpertBudget(32, 160), lambda n: weights * np.log1p(n))


def make_steps(rng: np.random.Generator) -> Landscape:
    """Returns that set in at a number of experts of the layer's own."""
    weights = np.exp(0.5 * smooth(32, rng, 0.2) + 0.3 * rng.normal(size=32))
    needed = rng.uniform(2, 7, size=32)
    return additive(ExpertBudget(32, 160), lambda n: weights / (1 + np.exp(needed - n)))


def make_triples(rng: np.random.Generator) -> Landscape:
    """Three layers in turn share their experts: it is their sum that counts."""
    budget = ExpertBudget(32, 160)
    weights = np.exp(0.7 * rng.normal(size=11))
    group = np.arange(32) // 3
    member = np.asarray(group[:, None] == np.arange(11), dtype=float)  # [L, 11]

    def value(n: Ints) -> Floats:
        gain: Floats = np.log1p(n @ member) @ weights
        return -gain

    return landscape(budget, value, [np.array(budget.uniform(rng).experts) for _ in range(10)])


def make_tilted(rng: np.random.Generator) -> Landscape:
    """Weights that rise or fall with depth, with scatter, and returns like the cube root."""
    slope = rng.choice([-1.0, 1.0]) * rng.uniform(0.4, 1.0)
    weights = np.exp(slope * np.linspace(-1, 1, 32) + 0.4 * rng.normal(size=32))
    return additive(ExpertBudget(32, 160), lambda n: weights * np.cbrt(n))


LANDSCAPES: dict[str, Callable[[np.random.Generator], Landscape]] = {
    "smooth": make_smooth,
    "rough": make_rough,
    "few": make_few,
    "alternating": make_alternating,
    "blocks": make_blocks,
    "saturating": make_saturating,
    "mixed": make_mixed,
    "inside": make_inside,
    "thin": make_thin,
    "coupled": make_coupled,
    "basins": make_basins,
    "shallow": make_shallow,
    "deep": make_deep,
    "ends": make_ends,
    "steps": make_steps,
    "triples": make_triples,
    "tilted": make_tilted,
}
