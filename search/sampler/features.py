"""What the model sees of an allocation: logarithms, other curves, neighbours, the coarse profile.

Notation: N allocations, L layers, V levels (numbers of experts), R curves beside the logarithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mola.allocation import Allocation, ExpertBudget
from search.sampler.moves import Floats, Ints

Belief = Allocation | Sequence[float]  # an allocation believed good, or a weight per layer

_CURVES = 6
_CURVE_SCALE = 0.6  # length scale of the curves, in units of the rescaled logarithm


@dataclass(frozen=True)
class Features:
    """Features of N allocations: log [N, L], curves [R, N, L], pairs [N, L-1], coarse [N, C]."""

    log: Floats
    curves: Floats
    pairs: Floats
    coarse: Floats


class FeatureMap:
    """Turns allocations of a budget into features, and features into prior covariances.

    Args:
        budget: the allowed allocations.
        priors: allocations believed good, or layers' weights as another search found them [L]: that
            layers deserve weights in proportion to what they have there is a direction of its own,
            which the data may follow, ignore or reverse.
    """

    def __init__(self, budget: ExpertBudget, priors: Sequence[Belief] = ()) -> None:
        self.first = min(budget.lows)
        self.basis = _value_basis(self.first, max(budget.highs), budget.total / budget.num_layers)
        layers = budget.num_layers
        depth = np.linspace(0.0, 1.0, layers)
        sign = np.where(np.arange(layers) % 2 == 0, 1.0, -1.0)
        self.depth = {
            "all": np.ones((layers, layers)),
            "long": _bell(depth, depth, 0.3),
            "short": _bell(depth, depth, 0.08),
            "none": np.eye(layers),
            "priors": _directions(priors, layers),
            "every other": np.outer(sign, sign) * _bell(depth, depth, 0.6),
        }
        centres = np.linspace(0.0, 1.0, max(1, min(8, layers // 3)))
        window = _bell(centres, depth, 0.6 / len(centres))
        self.window = window / window.sum(axis=1, keepdims=True)
        self.layers = layers

    def __call__(self, counts: Ints) -> Features:
        """Compute the features of counts [N, L]."""
        values = self.basis[counts - self.first]  # [N, L, 1 + R]
        log = values[..., 0]
        return Features(
            log=log,
            curves=np.moveaxis(values[..., 1:], -1, 0),
            pairs=log[:, :-1] * log[:, 1:],
            coarse=log @ self.window.T,
        )

    def part(self, feature: str, tie: str, a: Features, b: Features) -> Floats:
        """Compute one part's prior covariance [N_a, N_b] at variance 1."""
        if feature == "profile":
            return self.profile(tie, a, b)
        ties = self.depth[tie] * (2.0 / self.layers)
        return self.linear(feature, ties, a, b)

    def linear(self, feature: str, ties: Floats, a: Features, b: Features) -> Floats:
        """Compute x_a^T ties x_b for a feature that is linear in its weights."""
        if feature == "log":
            return a.log @ ties @ b.log.T
        if feature == "pairs":
            return a.pairs @ ties[:-1, :-1] @ b.pairs.T
        tied, width = a.curves @ ties, len(a.curves) * self.layers
        x = tied.transpose(1, 0, 2).reshape(
            len(a.log), width
        )  # curves side by side: one product for all
        y = b.curves.transpose(1, 0, 2).reshape(len(b.log), width)
        return x @ y.T

    def profile(self, tie: str, a: Features, b: Features) -> Floats:
        """Compute a bell-shaped covariance of the distance between profiles."""
        x, y = (a.coarse, b.coarse) if tie == "coarse" else (a.log, b.log)
        scale = (0.175 if tie == "coarse" else 0.5) * x.shape[1]
        squared = (x * x).sum(1)[:, None] + (y * y).sum(1) - 2.0 * (x @ y.T)
        bell: Floats = np.exp(-0.5 * np.maximum(squared, 0.0) / scale)
        return bell


def _value_basis(low: int, high: int, mean: float) -> Floats:
    """Give the logarithm, rescaled to about -1..1 and 0 at the mean, and R other curves, [V, 1+R].

    The curves are the leading principal functions of a smooth process over the logarithm, less
    what a constant and the logarithm explain.
    """
    log = np.log1p(np.arange(low, high + 1, dtype=float))
    half = max((log[-1] - log[0]) / 2, 1e-9)
    log = (log - np.log1p(mean)) / half
    if len(log) <= 2:
        return np.stack([log], axis=1)
    known = np.linalg.qr(np.stack([np.ones_like(log), log], axis=1))[0]
    rest = np.eye(len(log)) - known @ known.T
    sizes, curves = np.linalg.eigh(rest @ _bell(log, log, _CURVE_SCALE) @ rest)
    leading = np.argsort(sizes)[::-1][: min(_CURVES, len(log) - 2)]
    curves = curves[:, leading] * np.sqrt(np.maximum(sizes[leading], 0.0))
    return np.concatenate([log[:, None], curves], axis=1)


def _directions(priors: Sequence[Belief], layers: int) -> Floats:
    """Tie weights as what is believed does: w ~ theta q, q its deviations, scaled to 1."""
    total = np.zeros((layers, layers))
    for prior in priors:
        believed = np.array(prior.experts if isinstance(prior, Allocation) else prior, dtype=float)
        deviations = believed - believed.mean()
        if deviations.any():
            q = deviations / deviations.std()
            total += np.outer(q, q)
    return total


def _bell(a: Floats, b: Floats, scale: float) -> Floats:
    bell: Floats = np.exp(-0.5 * ((a[:, None] - b) / scale) ** 2)
    return bell
