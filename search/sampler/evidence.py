"""How much of the objective each part of the model explains, learnt from the data.

The parts' variances, each layer's own scale and the noise maximise the posterior density of all of
them together. Layers that matter stand out by their scales, so that few strong layers among many
weak ones are told apart from many of equal strength.

Notation: N observations, L layers, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from search.sampler.features import FeatureMap
from search.sampler.moves import Floats
from search.sampler.observations import Observations

JITTER = 1e-6  # of the values' variance, so that matrices can be inverted
_FIT_ON = 256  # observations that the variances are fitted to
_STEPS = 40

# (feature, how depth ties it, prior median of its variance in units of the values' variance).
# What departs from diminishing returns layer by layer starts small and must be asked for.
PARTS = (
    ("log", "all", 0.3),
    ("log", "long", 1.0),
    ("log", "short", 0.5),
    ("log", "none", 0.7),
    ("log", "every other", 0.2),
    ("log", "priors", 1.0),
    ("curves", "all", 0.01),
    ("curves", "long", 0.005),
    ("curves", "none", 0.005),
    ("pairs", "all", 0.005),
    ("pairs", "none", 0.0025),
    ("profile", "coarse", 0.0075),
    ("profile", "fine", 0.0025),
)
_SPREAD = 3.0  # prior standard deviation of the logarithm of a variance
_NOISE = 0.05
_NOISE_SPREAD = 3.0
_LAYER_SPREAD = 1.0  # of the logarithm of a layer's own scale


@dataclass(frozen=True)
class Variances:
    """What a prior process is made of, in units of the values' variance.

    Attributes:
        parts: [P] variances of PARTS.
        layers: [L] scales of the layers' own shares, about 1.
        noise: variance of a full measurement.
    """

    parts: Floats
    layers: Floats
    noise: float

    def ties(self, features: FeatureMap, feature: str) -> Floats:
        """Give the prior covariance [L, L] of a feature's weights over depth."""
        total = np.zeros((features.layers, features.layers))
        for variance, (name, tie, _) in zip(self.parts, PARTS, strict=True):
            if name == feature:
                total += variance * (2.0 / features.layers) * features.depth[tie]
                if tie == "none":
                    own = variance * (2.0 / features.layers) * (self.layers - 1.0)
                    total[np.diag_indices(features.layers)] += own
        return total

    def profile(self, tie: str) -> float:
        """Give the variance of the function of the whole profile, coarse or fine."""
        return float(self.parts[[part[:2] for part in PARTS].index(("profile", tie))])


def learn(features: FeatureMap, observations: Observations) -> Variances:
    """Maximise the posterior density of the variances by gradient ascent on their logarithms.

    Source: gradient of the log marginal likelihood, Rasmussen and Williams, Gaussian Processes for
    Machine Learning, eq. 5.9; steps as in Adam (arXiv 1412.6980).
    """
    observations = observations.spread(_FIT_ON)
    at = features(observations.counts)
    count, layers = len(observations.values), features.layers
    grams = np.stack([features.part(f, tie, at, at) for f, tie, _ in PARTS] + [np.eye(count)])
    flat = grams.reshape(len(grams), -1)  # [P + 1, N * N]
    own = [i for i, (f, tie, _) in enumerate(PARTS) if tie == "none" and f != "pairs"]
    columns = {"log": at.log[None], "curves": at.curves}  # [R, N, L]
    known = observations.levels() + np.diag(JITTER + observations.variances / observations.scale**2)
    parts = len(PARTS)
    prior = np.log([median for *_, median in PARTS] + [_NOISE] + [1.0] * layers)
    spread = np.array([_SPREAD] * parts + [_NOISE_SPREAD] + [_LAYER_SPREAD] * layers)
    logs, drift, power = prior.copy(), np.zeros(len(prior)), np.zeros(len(prior))
    for step in range(1, _STEPS + 1):
        weights, scales = np.exp(logs[: parts + 1]), np.exp(logs[parts + 1 :])
        for i in own:
            x = columns[PARTS[i][0]]
            grams[i] = (2.0 / layers) * ((x * scales) @ x.transpose(0, 2, 1)).sum(axis=0)
        inverse = np.linalg.inv((weights @ flat).reshape(count, count) + known)
        alpha = inverse @ observations.standard
        pull = np.outer(alpha, alpha) - inverse
        by_layer = np.zeros(layers)
        for i in own:
            x = columns[PARTS[i][0]]
            by_layer += weights[i] * (2.0 / layers) * ((pull @ x) * x).sum(axis=(0, 1))
        slope = 0.5 * np.concatenate([weights * (flat @ pull.ravel()), scales * by_layer])
        slope -= (logs - prior) / spread**2
        drift = 0.8 * drift + 0.2 * slope
        power = 0.9 * power + 0.1 * slope**2
        rate = 0.25 if step < 0.6 * _STEPS else 0.08
        scaled = np.sqrt(power / (1 - 0.9**step)) + 0.1
        logs = logs + rate * (drift / (1 - 0.8**step)) / scaled
    found = np.exp(logs)
    return Variances(found[:parts], found[parts + 1 :], float(found[parts]))
