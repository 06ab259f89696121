"""A Gaussian process over allocations that learns what kind of landscape it sees.

The objective is modelled as a sum of parts, each a Gaussian process whose variance the data decide:

- every layer's own diminishing return w_l log(1 + n_l), with weights w that depth ties together
  not at all, over short or long ranges, or between every other layer;
- any other curve of the number of experts, alike in all layers or not (a penalty on thin layers);
- products of neighbouring layers; and a smooth function of the profile as a whole (two basins);
- a level per group of trials that share a seed, and noise.

Notation: N observations, M allocations asked about, L layers, V levels (numbers of experts).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from search.features import FeatureMap, Features
from search.moves import Floats, Ints

_LEVEL_VARIANCE = 4.0  # of a group's level, in units of the values' variance: nearly free
_JITTER = 1e-6
_FIT_ON = 256  # observations that the variances are fitted to
_STEPS = 40

# (feature, how depth ties it, prior median of its variance in units of the values' variance)
_PARTS = (
    ("log", "all", 0.3),
    ("log", "long", 1.0),
    ("log", "short", 0.5),
    ("log", "none", 0.7),
    ("log", "every other", 0.2),
    ("curves", "all", 0.2),
    ("curves", "long", 0.1),
    ("curves", "none", 0.1),
    ("pairs", "all", 0.1),
    ("pairs", "none", 0.05),
    ("profile", "coarse", 0.15),
    ("profile", "fine", 0.05),
)
_NOISE = 0.05
_NOISE_SPREAD = 3.0
_SPREAD = 1.5  # prior standard deviation of the logarithm of a variance


@dataclass(frozen=True)
class Observations:
    """What has been measured; lower values are better.

    Attributes:
        counts: [N, L] experts per layer.
        values: [N] finite objective values.
        variances: [N] known extra noise of each value, 0 for a full measurement.
        groups: [N] equal for trials with a common seed, whose values share a level; 0 is the group
            at whose level the model answers.
    """

    counts: Ints
    values: Floats
    variances: Floats
    groups: Ints

    def take(self, rows: Ints) -> Observations:
        """Select observations."""
        return Observations(
            self.counts[rows], self.values[rows], self.variances[rows], self.groups[rows]
        )


class Posterior:
    """The process given the observations and the fitted variances of its parts.

    All results are at the level of group 0, in the values' own units.
    """

    def __init__(
        self,
        features: FeatureMap,
        observations: Observations,
        variances: Floats,
        pending: Ints | None = None,
    ) -> None:
        self.features = features
        self.offset = float(observations.values.mean())
        self.scale = _scale(observations.values)
        self._ties = {
            feature: sum(
                (
                    v * features.depth[tie] * (2.0 / features.layers)
                    for v, (f, tie, _) in zip(variances[:-1], _PARTS, strict=True)
                    if f == feature
                ),
                np.zeros((features.layers, features.layers)),
            )
            for feature in ("log", "curves", "pairs")
        }
        self._profile = {
            tie: float(v)
            for v, (f, tie, _) in zip(variances[:-1], _PARTS, strict=True)
            if f == "profile"
        }
        self.noise = float(variances[-1])
        self._seen = features(observations.counts)
        self._same = _LEVEL_VARIANCE * (observations.groups == 0)
        gram = self._prior(self._seen, self._seen) + _levels(observations.groups)
        gram[np.diag_indices_from(gram)] += (
            self.noise + _JITTER + observations.variances / self.scale**2
        )
        self._root = np.linalg.inv(np.linalg.cholesky(gram))  # [N, N], gram^-1 = root^T root
        standard = (observations.values - self.offset) / self.scale
        self._alpha = self._root.T @ (self._root @ standard)
        self._pending: tuple[Features, Floats] | None = None
        if pending is not None and len(pending):
            waiting = features(pending)
            half = self._half(waiting)
            cov = self._prior(waiting, waiting) + _LEVEL_VARIANCE - half.T @ half
            cov[np.diag_indices_from(cov)] += self.noise + _JITTER
            self._pending = waiting, np.linalg.inv(np.linalg.cholesky(cov))

    def mean(self, counts: Ints) -> Floats:
        """Give the posterior mean [N] of the objective at counts [N, L]."""
        return self.offset + self.scale * self._standard_mean(self.features(counts))

    def mean_and_deviation(self, counts: Ints) -> tuple[Floats, Floats]:
        """Give the posterior mean and standard deviation [N], without noise.

        Pending trials narrow the deviation, as their results will, and leave the mean alone.
        """
        at = self.features(counts)
        half = self._half(at)
        variance = self._prior_variance(at) + _LEVEL_VARIANCE - (half * half).sum(axis=0)
        if self._pending is not None:
            waiting, root = self._pending
            cross = self._prior(waiting, at) + _LEVEL_VARIANCE - self._half(waiting).T @ half
            variance -= ((root @ cross) ** 2).sum(axis=0)
        mean = self.offset + self.scale * self._standard_mean(at)
        return mean, self.scale * np.sqrt(np.maximum(variance, 0.0))

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
        variance = self._prior_variance(at) + _LEVEL_VARIANCE - (half * half).sum(axis=0)
        if self._pending is not None:
            waiting, root = self._pending
            explained = self._half(waiting)
            cross = root @ (self._prior(waiting, at) + _LEVEL_VARIANCE - explained.T @ half)
            ends_cross = root @ (
                self._prior(waiting, ends) + _LEVEL_VARIANCE - explained.T @ half_ends
            )
            cov -= ends_cross.T @ cross
            variance -= (cross * cross).sum(axis=0)
        differences = cov[1:] - cov[0]
        fall: Floats = (differences**2).mean(axis=0) / (np.maximum(variance, 0.0) + self.noise)
        return fall * self.scale**2

    def tables(self) -> Floats:
        """Give the posterior mean of each layer's own share, [L, V], up to a constant."""
        seen = self._seen
        shares = [self._ties["log"] @ seen.log.T @ self._alpha]
        shares += [self._ties["curves"] @ curve.T @ self._alpha for curve in seen.curves]
        return self.scale * np.stack(shares, axis=1) @ self.features.basis.T

    def _standard_mean(self, at: Features) -> Floats:
        mean: Floats = (self._prior(at, self._seen) + self._same) @ self._alpha
        return mean

    def _half(self, at: Features) -> Floats:
        """Give root @ covariance(seen, at), [N, M]: half of the variance that the data explain."""
        half: Floats = self._root @ (self._prior(self._seen, at) + self._same[:, None])
        return half

    def _prior(self, a: Features, b: Features) -> Floats:
        total = sum(
            (v * self.features.profile(tie, a, b) for tie, v in self._profile.items()),
            np.zeros((len(a.log), len(b.log))),
        )
        for feature, ties in self._ties.items():
            total += self.features.linear(feature, ties, a, b)
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
    """Fit the variances of the parts and condition on all observations.

    Args:
        features: of the budget that is searched.
        observations: at least one.
        pending: [P, L] allocations whose results are on their way.
    """
    chosen = observations.take(_spread(observations.values, _FIT_ON))
    return Posterior(features, observations, _variances(features, chosen), pending)


def _variances(features: FeatureMap, observations: Observations) -> Floats:
    """Maximise the posterior of the parts' variances and the noise, last, by gradient ascent.

    Source: gradient of the log marginal likelihood, Rasmussen and Williams, Gaussian Processes for
    Machine Learning, eq. 5.9; steps as in Adam (arXiv 1412.6980).
    """
    count = len(observations.values)
    at = features(observations.counts)
    grams = np.stack(
        [features.part(f, tie, at, at) for f, tie, _ in _PARTS] + [np.eye(count)]
    )  # [P, N, N]
    flat = grams.reshape(len(grams), -1)
    scale = _scale(observations.values)
    standard = (observations.values - observations.values.mean()) / scale
    fixed = _levels(observations.groups)
    fixed[np.diag_indices(count)] += _JITTER + observations.variances / scale**2
    prior = np.log([median for *_, median in _PARTS] + [_NOISE])
    spread = np.full(len(prior), _SPREAD)
    spread[-1] = _NOISE_SPREAD
    logs, drift, power = prior.copy(), np.zeros(len(prior)), np.zeros(len(prior))
    for step in range(1, _STEPS + 1):
        weights = np.exp(logs)
        inverse = np.linalg.inv((weights @ flat).reshape(count, count) + fixed)
        alpha = inverse @ standard
        pull = np.outer(alpha, alpha) - inverse
        gradient = 0.5 * weights * (flat @ pull.ravel()) - (logs - prior) / spread**2
        drift = 0.8 * drift + 0.2 * gradient
        power = 0.9 * power + 0.1 * gradient**2
        rate = 0.25 if step < 0.6 * _STEPS else 0.08
        scaled = np.sqrt(power / (1 - 0.9**step)) + 0.1
        logs = logs + rate * (drift / (1 - 0.8**step)) / scaled
    fitted: Floats = np.exp(logs)
    return fitted


def _levels(groups: Ints) -> Floats:
    same: Floats = _LEVEL_VARIANCE * np.asarray(groups[:, None] == groups, dtype=float)
    return same


def _scale(values: Floats) -> float:
    deviation = float(values.std())
    return deviation if deviation > 1e-12 * max(1.0, float(np.abs(values).max())) else 1.0


def _spread(values: Floats, limit: int) -> Ints:
    """Choose up to `limit` observations: the better half by value, the rest evenly."""
    order = np.argsort(values, kind="stable")
    if len(order) <= limit:
        return np.sort(order)
    rest = order[limit // 2 :]
    evenly = rest[np.linspace(0, len(rest) - 1, limit - limit // 2).astype(int)]
    return np.sort(np.concatenate([order[: limit // 2], evenly]))
