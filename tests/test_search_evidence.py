"""The variances that are learnt maximise the posterior density, computed here on its own."""

from __future__ import annotations

import numpy as np
import pytest

from mola.allocation import ExpertBudget
from search.sampler.evidence import JITTER, PARTS, learn
from search.sampler.features import FeatureMap
from search.sampler.observations import Observations

BUDGET = ExpertBudget(8, 32, 1, 8)
FEATURES = FeatureMap(BUDGET)
MEDIANS = [median for *_, median in PARTS] + [0.05] + [1.0] * 8  # of parts, noise, layers
SPREADS = [3.0] * len(PARTS) + [3.0] + [1.0] * 8


def observed(count: int) -> Observations:
    """Lower layers want experts; two groups at different levels, and some doubtful values."""
    rng = np.random.default_rng(0)
    counts = np.array([BUDGET.uniform(rng).experts for _ in range(count)])
    groups = (np.arange(count) % 3 == 2).astype(int)
    values = 0.3 * groups - np.log1p(counts) @ np.linspace(2, 0.2, 8)
    doubt = np.where(np.arange(count) % 4 == 3, 0.5, 0.0)
    values += np.sqrt(0.01 + doubt) * rng.normal(size=count)
    return Observations(counts, 4 * values, 16 * doubt, groups)


def density(observations: Observations, logs: np.ndarray) -> float:
    """Give the logarithm of the posterior density of the logarithms of the variances."""
    at, parts = FEATURES(observations.counts), len(PARTS)
    variances, scales = np.exp(logs[: parts + 1]), np.exp(logs[parts + 1 :])
    doubt = observations.variances / observations.scale**2
    gram = observations.levels() + np.diag(doubt + JITTER + variances[parts])
    for variance, (feature, tie, _) in zip(variances[:parts], PARTS, strict=True):
        if tie == "none" and feature != "pairs":
            columns = [at.log] if feature == "log" else list(at.curves)
            gram += variance * 2 / len(scales) * sum((x * scales) @ x.T for x in columns)
        else:
            gram += variance * FEATURES.part(feature, tie, at, at)
    y = observations.standard
    fit = y @ np.linalg.solve(gram, y) + np.linalg.slogdet(gram)[1]
    return float(-0.5 * fit - 0.5 * (((logs - np.log(MEDIANS)) / SPREADS) ** 2).sum())


@pytest.mark.parametrize("count", [4, 12, 40])
def test_no_step_from_what_is_learnt_makes_it_likelier(count: int) -> None:
    observations = observed(count)
    found = learn(FEATURES, observations)
    logs = np.log(np.concatenate([found.parts, [found.noise], found.layers]))
    reached = density(observations, logs)
    assert reached > density(observations, np.log(MEDIANS)) + 0.1
    for step in np.concatenate([np.eye(len(logs)), -np.eye(len(logs))]):
        for size in (0.2, 1.0):
            assert density(observations, logs + size * step) < reached + 0.02
