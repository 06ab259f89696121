"""A Gaussian process over allocations that learns what kind of landscape it sees.

The objective is modelled as a sum of parts, each a Gaussian process whose variance the data decide:

- every layer's own diminishing return w_l log(1 + n_l), with weights w that depth ties together
  not at all, over short or long ranges, or between every other layer, and that allocations believed
  good may suggest;
- any other curve of the number of experts, alike in all layers or not (a penalty on thin layers);
- products of neighbouring layers; and a smooth function of the profile as a whole (two basins);
- a level per group of trials that share a seed, and noise.

Notation: N observations, M allocations asked about, L layers, V levels (numbers of experts).
"""

from __future__ import annotations

import numpy as np

from search.sampler.evidence import JITTER, Variances, learn
from search.sampler.features import FeatureMap, Features
from search.sampler.moves import Floats, Ints
from search.sampler.observations import LEVEL_VARIANCE, Observations


class Posterior:
    """The process given the observations and the fitted variances of its parts.

    All results are at the level of group 0, in the values' own units.
    """

    def __init__(
        self,
        features: FeatureMap,
        observations: Observations,
        variances: Variances,
        pending: Ints | None = None,
    ) -> None:
        self.features = features
        self.offset = float(observations.values.mean())
        self.scale = observations.scale
        self.noise = variances.noise
        self._ties = {f: variances.ties(features, f) for f in ("log", "curves", "pairs")}
        self._profile = {tie: variances.profile(tie) for tie in ("coarse", "fine")}
        self._seen = features(observations.counts)
        self._same = LEVEL_VARIANCE * (observations.groups == 0)
        rest = self._interactions(self._seen, self._seen) + observations.levels()
        rest += np.diag(self.noise + JITTER + observations.variances / self.scale**2)
        self._rest = rest
        gram = rest + self._additive(self._seen, self._seen)
        self._root = np.linalg.inv(np.linalg.cholesky(gram))  # [N, N], gram^-1 = root^T root
        self._alpha = self._root.T @ (self._root @ observations.standard)
        shares = [self._ties["log"] @ self._seen.log.T @ self._alpha]
        shares += [self._ties["curves"] @ curve.T @ self._alpha for curve in self._seen.curves]
        self._tables: Floats = np.stack(shares, axis=1) @ features.basis.T  # [L, V]
        between = self._ties["pairs"][:-1, :-1]
        self._pair_weights: Floats = between @ (self._seen.pairs.T @ self._alpha)  # [L-1]
        self._pending: tuple[Features, Floats] | None = None
        if pending is not None and len(pending):
            waiting = features(pending)
            half = self._half(waiting)
            cov = self._prior(waiting, waiting) + LEVEL_VARIANCE - half.T @ half
            cov[np.diag_indices_from(cov)] += self.noise + JITTER
            self._pending = waiting, np.linalg.inv(np.linalg.cholesky(cov))

    def mean(self, counts: Ints) -> Floats:
        """Give the posterior mean [N] of the objective at counts [N, L]."""
        return self._mean(counts, self.features(counts))

    def mean_and_deviation(self, counts: Ints) -> tuple[Floats, Floats]:
        """Give the posterior mean and standard deviation [N], without noise.

        Pending trials narrow the deviation, as their results will, and leave the mean alone.
        """
        at = self.features(counts)
        half = self._half(at)
        variance = self._prior_variance(at) + LEVEL_VARIANCE - (half * half).sum(axis=0)
        if self._pending is not None:
            waiting, root = self._pending
            cross = self._prior(waiting, at) + LEVEL_VARIANCE - self._half(waiting).T @ half
            variance -= ((root @ cross) ** 2).sum(axis=0)
        return self._mean(counts, at), self.scale * np.sqrt(np.maximum(variance, 0.0))

    def gain(self, counts: Ints, base: Ints, moves: Ints) -> Floats:
        """Say how much a trial would tell about moves from a base, [M].

        Args:
            counts: [M, L] allocations that could be tried.
            base: [L] where the moves start.
            moves: [S, L] where they end.

        Returns:
            The expected fall of the variance of f(move) - f(base), mean over the moves, in units of
            the squared values.
        """
        at = self.features(counts)
        ends = self.features(np.concatenate([base[None], moves]))
        half, half_ends = self._half(at), self._half(ends)
        cov = self._prior(ends, at) - half_ends.T @ half
        variance = self._prior_variance(at) + LEVEL_VARIANCE - (half * half).sum(axis=0)
        if self._pending is not None:
            waiting, root = self._pending
            explained = self._half(waiting)
            cross = root @ (self._prior(waiting, at) + LEVEL_VARIANCE - explained.T @ half)
            ends_cross = root @ (
                self._prior(waiting, ends) + LEVEL_VARIANCE - explained.T @ half_ends
            )
            cov -= ends_cross.T @ cross
            variance -= (cross * cross).sum(axis=0)
        differences = cov[1:] - cov[0]
        fall: Floats = (differences**2).mean(axis=0) / (np.maximum(variance, 0.0) + self.noise)
        return fall * self.scale**2

    def tables(self) -> Floats:
        """Give the posterior mean of each layer's own share, [L, V], up to a constant."""
        return self.scale * self._tables

    def samples(self, count: int, rng: np.random.Generator) -> Floats:
        """Draw each layer's own share from the posterior, [S, L, V], up to a constant.

        A draw from the prior, corrected by what the data say about its errors there.
        Source: Matheron's rule, arXiv 2002.09309, eq. 5.
        """
        seen, ties, layers = self._seen, self._ties, self.features.layers
        roots = {f: _root_of(ties[f]) for f in ("log", "curves")}
        log = rng.normal(size=(count, layers)) @ roots["log"].T  # [S, L]
        curves = rng.normal(size=(len(seen.curves), count, layers)) @ roots["curves"].T
        drawn = log @ seen.log.T + (curves @ seen.curves.transpose(0, 2, 1)).sum(axis=0)  # [S, N]
        drawn += rng.normal(size=drawn.shape) @ np.linalg.cholesky(self._rest).T
        alpha = self._alpha - drawn @ self._root.T @ self._root
        shares = [log + alpha @ seen.log @ ties["log"]]
        shares += [
            own + alpha @ curve @ ties["curves"]
            for own, curve in zip(curves, seen.curves, strict=True)
        ]
        tables: Floats = self.scale * np.stack(shares, axis=2) @ self.features.basis.T
        return tables

    def _mean(self, counts: Ints, at: Features) -> Floats:
        own = self._tables[np.arange(self.features.layers), counts - self.features.first]
        rest = at.pairs @ self._pair_weights + self._same @ self._alpha
        for tie, variance in self._profile.items():
            rest += variance * (self.features.profile(tie, at, self._seen) @ self._alpha)
        mean: Floats = self.offset + self.scale * (own.sum(axis=1) + rest)
        return mean

    def _half(self, at: Features) -> Floats:
        """Give root @ covariance(seen, at), [N, M]: half of the variance that the data explain."""
        half: Floats = self._root @ (self._prior(self._seen, at) + self._same[:, None])
        return half

    def _prior(self, a: Features, b: Features) -> Floats:
        return self._additive(a, b) + self._interactions(a, b)

    def _additive(self, a: Features, b: Features) -> Floats:
        linear = self.features.linear
        return linear("log", self._ties["log"], a, b) + linear("curves", self._ties["curves"], a, b)

    def _interactions(self, a: Features, b: Features) -> Floats:
        total = self.features.linear("pairs", self._ties["pairs"], a, b)
        for tie, variance in self._profile.items():
            total += variance * self.features.profile(tie, a, b)
        return total

    def _prior_variance(self, at: Features) -> Floats:
        ties = self._ties
        total = np.full(len(at.log), sum(self._profile.values()))
        total += ((at.log @ ties["log"]) * at.log).sum(axis=1)
        total += ((at.pairs @ ties["pairs"][:-1, :-1]) * at.pairs).sum(axis=1)
        for curve in at.curves:
            total += ((curve @ ties["curves"]) * curve).sum(axis=1)
        return total


def fit(features: FeatureMap, observations: Observations, pending: Ints | None = None) -> Posterior:
    """Learn the variances of the parts and condition on all observations.

    Args:
        features: of the budget that is searched.
        observations: at least one.
        pending: [P, L] allocations whose results are on their way.
    """
    return Posterior(features, observations, learn(features, observations), pending)


def _root_of(covariance: Floats) -> Floats:
    sizes, directions = np.linalg.eigh(covariance)
    root: Floats = directions * np.sqrt(np.maximum(sizes, 0.0))
    return root
