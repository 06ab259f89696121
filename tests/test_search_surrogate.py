"""The Gaussian process, against a plain one written out, and what it learns of landscapes."""

from __future__ import annotations

import numpy as np
import pytest

from mola.allocation import Allocation, ExpertBudget
from search.sampler.evidence import PARTS, Variances, learn
from search.sampler.features import FeatureMap
from search.sampler.observations import LEVEL_VARIANCE, Observations
from search.sampler.surrogate import Posterior, fit

BUDGET = ExpertBudget(8, 32, 1, 8)
PRIORS = [Allocation([1, 1, 2, 3, 4, 5, 8, 8]), Allocation([8, 4, 4, 4, 4, 4, 2, 2])]
NAMES = [(feature, tie) for feature, tie, _ in PARTS]


def draws(count: int, budget: ExpertBudget = BUDGET, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([budget.uniform(rng).experts for _ in range(count)])


def observed(
    counts: np.ndarray, values: np.ndarray, groups: list[int] | None = None
) -> Observations:
    return Observations(
        counts, values, np.zeros(len(values)), np.array(groups or [0] * len(values))
    )


def naive_kernel(features: FeatureMap, variances: Variances, a: np.ndarray, b: np.ndarray) -> float:
    """Compute the prior covariance of two allocations by the definition, in loops."""
    x, y = features(a[None]), features(b[None])
    layers, total = len(a), 0.0
    for variance, (feature, tie) in zip(variances.parts, NAMES, strict=True):
        if feature == "profile":
            p, q = (x.coarse, y.coarse) if tie == "coarse" else (x.log, y.log)
            scale = (0.175 if tie == "coarse" else 0.5) * p.shape[1]
            total += variance * np.exp(-0.5 * ((p - q) ** 2).sum() / scale)
            continue
        ties = np.diag(variances.layers) if tie == "none" else features.depth[tie]
        pairs = {"log": [(x.log[0], y.log[0])], "pairs": [(x.pairs[0], y.pairs[0])]}
        curves = list(zip(x.curves[:, 0], y.curves[:, 0], strict=True))
        for u, v in pairs.get(feature, curves):
            for i in range(len(u)):
                for j in range(len(v)):
                    total += variance * 2 / layers * u[i] * ties[i, j] * v[j]
    return total


@pytest.fixture(scope="module")
def case() -> tuple[FeatureMap, Observations, Variances]:
    rng = np.random.default_rng(3)
    counts = draws(9)
    observations = Observations(
        counts,
        rng.normal(5, 2, size=9),
        np.array([0.0] * 6 + [0.5] * 3),
        np.array([0, 0, 1, 0, 2, 0, 0, 1, 0]),
    )
    parts = np.exp(rng.normal(-1, 0.5, size=len(PARTS)))
    variances = Variances(parts, np.exp(rng.normal(size=8)), 0.3)
    return FeatureMap(BUDGET, PRIORS), observations, variances


def plain_posterior(
    features: FeatureMap, observations: Observations, variances: Variances, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Condition a Gaussian on the observations, in standardised units, with a free level."""
    mean, scale = observations.values.mean(), observations.values.std()
    both = np.concatenate([observations.counts, at])
    groups = np.concatenate([observations.groups, np.zeros(len(at))])
    kernel = np.array([[naive_kernel(features, variances, a, b) for b in both] for a in both])
    kernel += LEVEL_VARIANCE * (groups[:, None] == groups)
    n = len(observations.values)
    noise = variances.noise + 1e-6 + observations.variances / scale**2
    solved = np.linalg.solve(kernel[:n, :n] + np.diag(noise), kernel[:n, n:])
    standard = (observations.values - mean) / scale
    return mean + scale * solved.T @ standard, scale**2 * (kernel[n:, n:] - kernel[n:, :n] @ solved)


def test_mean_and_deviation_are_those_of_the_conditioned_gaussian(case: tuple) -> None:
    features, observations, variances = case
    at = draws(5, seed=9)
    mean, covariance = plain_posterior(features, observations, variances, at)
    model = Posterior(features, observations, variances)
    found, deviation = model.mean_and_deviation(at)
    np.testing.assert_allclose(found, mean, rtol=1e-8)
    np.testing.assert_allclose(model.mean(at), mean, rtol=1e-8)
    np.testing.assert_allclose(deviation**2, np.diag(covariance), rtol=1e-6)


def test_gain_is_the_fall_of_the_variance_of_moves(case: tuple) -> None:
    features, observations, variances = case
    model = Posterior(features, observations, variances)
    trial, base, *ends = draws(5, seed=11)
    at = np.stack([trial, base, *ends])
    _, covariance = plain_posterior(features, observations, variances, at)
    noise = variances.noise * observations.values.std() ** 2
    cross = covariance[0, 2:] - covariance[0, 1]
    expected = (cross**2).mean() / (covariance[0, 0] + noise)
    found = model.gain(trial[None], base, np.stack(ends))
    np.testing.assert_allclose(found, [expected], rtol=1e-6)


def test_pending_trials_narrow_the_deviation_and_leave_the_mean(case: tuple) -> None:
    features, observations, variances = case
    pending, at = draws(3, seed=13), draws(6, seed=14)
    model = Posterior(features, observations, variances, pending)
    mean, deviation = model.mean_and_deviation(at)
    np.testing.assert_allclose(mean, Posterior(features, observations, variances).mean(at))
    # The same as results at the pending allocations, whatever they are, at the same scale.
    _, both = plain_posterior(features, observations, variances, np.concatenate([pending, at]))
    noise = (variances.noise + 1e-6) * observations.values.std() ** 2
    inside = both[:3, :3] + noise * np.eye(3)
    expected = both[3:, 3:] - both[3:, :3] @ np.linalg.solve(inside, both[:3, 3:])
    np.testing.assert_allclose(deviation**2, np.diag(expected), rtol=1e-6)
    base, ends = at[0], at[1:3]
    cross = expected[3:, 1:3] - expected[3:, :1]
    spread = np.diag(expected)[3:] + variances.noise * observations.values.std() ** 2
    fall = (cross**2).mean(axis=1) / spread
    np.testing.assert_allclose(model.gain(at[3:], base, ends), fall, rtol=1e-5)


def test_tables_add_up_to_the_additive_part_of_the_mean() -> None:
    features = FeatureMap(BUDGET)
    parts = np.array([1.0 if f in ("log", "curves") else 1e-12 for f, _ in NAMES])
    variances = Variances(parts, np.ones(8), 0.01)
    rng = np.random.default_rng(0)
    model = Posterior(features, observed(draws(20), rng.normal(size=20)), variances)
    at = draws(6, seed=5)
    sums = model.tables()[np.arange(8), at - 1].sum(axis=1)
    differences = model.mean(at) - sums
    np.testing.assert_allclose(differences, differences[0], atol=1e-6)


def test_smooth_and_rough_landscapes_are_told_apart() -> None:
    budget = ExpertBudget(24, 96)
    features, counts = FeatureMap(budget), draws(60, budget)
    log = np.log1p(counts)
    depth = np.linspace(-1, 1, 24)
    none, long = NAMES.index(("log", "none")), NAMES.index(("log", "long"))
    smooth = learn(features, observed(counts, log @ depth)).parts
    shuffled = np.random.default_rng(1).permutation(depth)
    rough = learn(features, observed(counts, log @ shuffled)).parts
    assert smooth[long] > 10 * smooth[none]
    assert rough[none] > rough[long]


def test_layers_that_matter_stand_out() -> None:
    budget = ExpertBudget(24, 96)
    counts = draws(80, budget)
    weights = np.full(24, 0.05)
    weights[[3, 11, 18]] = 2.0
    layers = learn(FeatureMap(budget), observed(counts, np.log1p(counts) @ weights)).layers
    assert set(np.argsort(layers)[-3:]) == {3, 11, 18}
    assert layers[[3, 11, 18]].min() > 2 * np.delete(layers, [3, 11, 18]).max()


def test_samples_have_the_mean_and_spread_of_the_layers_shares(case: tuple) -> None:
    """Means of 4000 draws; six standard errors hold but for one draw of a generator in 1e6."""
    features, observations, variances = case
    only = np.array(
        [
            v if f in ("log", "curves") else 1e-12
            for v, (f, _) in zip(variances.parts, NAMES, strict=True)
        ]
    )
    model = Posterior(features, observations, Variances(only, variances.layers, variances.noise))
    drawn = model.samples(4000, np.random.default_rng(0))
    error = 6 * drawn.std(axis=0) / np.sqrt(4000)
    assert (np.abs(drawn.mean(axis=0) - model.tables()) <= error).all()
    a, b = draws(2, seed=21)
    at = np.arange(8)
    difference = drawn[:, at, a - 1].sum(axis=1) - drawn[:, at, b - 1].sum(axis=1)
    _, covariance = plain_posterior(
        features, observations, Variances(only, variances.layers, variances.noise), np.stack([a, b])
    )
    expected = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    assert difference.var() == pytest.approx(expected, rel=0.15)  # 6.7 standard errors


def test_a_prior_is_followed_ignored_or_reversed_as_the_data_say() -> None:
    budget = ExpertBudget(16, 80)
    weights = np.random.default_rng(4).permutation(np.linspace(0, 2, 16))
    prior = budget.project(5 + 3 * (weights - weights.mean()))
    counts, at = draws(8, budget, seed=1), draws(200, budget, seed=2)
    truth = -np.log1p(at) @ weights

    def skill(priors: list[Allocation], sign: float) -> float:
        model = fit(
            FeatureMap(budget, priors), observed(counts, -sign * np.log1p(counts) @ weights)
        )
        return float(np.corrcoef(model.mean(at), sign * truth)[0, 1])

    assert skill([prior], 1.0) > 0.9
    assert skill([prior], -1.0) > 0.9
    assert skill([prior], 1.0) > skill([], 1.0) + 0.1
    useless = Allocation(np.random.default_rng(5).permutation(prior.experts))
    assert skill([useless], 1.0) > skill([], 1.0) - 0.15


def test_noise_is_estimated() -> None:
    budget = ExpertBudget(12, 60)
    counts = draws(120, budget)
    truth = np.log1p(counts) @ np.linspace(0, 1, 12)
    noise = 0.5 * truth.std() * np.random.default_rng(2).normal(size=120)
    model = fit(FeatureMap(budget), observed(counts, truth + noise))
    estimated = np.sqrt(model.noise) * model.scale
    assert 0.7 < estimated / noise.std() < 1.4
    assert np.corrcoef(model.mean(counts), truth)[0, 1] > 0.97


def test_a_groups_level_does_not_move_the_allocations() -> None:
    counts = draws(30)
    truth = np.log1p(counts) @ np.linspace(0, 1, 8)
    groups = [0] * 20 + [1] * 10
    shifted = truth + np.where(np.array(groups) == 1, 100.0, 0.0)
    model = fit(FeatureMap(BUDGET), observed(counts, shifted, groups))
    assert np.abs(model.mean(counts) - truth).max() < 1.0


def test_long_histories_are_fitted_to_the_best_and_some_of_the_rest() -> None:
    values = np.random.default_rng(0).permutation(100).astype(float)
    some = observed(draws(100), values).spread(20)
    assert len(some.values) == 20
    assert set(range(10)) < set(some.values.tolist())
    rest = sorted(v for v in some.values if v >= 10)
    assert (rest[0], rest[-1]) == (10, 99)
    assert set(np.diff(rest)) == {9, 10}
    assert [np.flatnonzero(values == v)[0] for v in some.values] == sorted(
        np.flatnonzero(values == v)[0] for v in some.values
    )


def test_a_history_within_the_limit_is_fitted_to_as_it_is() -> None:
    whole = observed(draws(20), np.arange(20.0))
    assert whole.spread(20) is whole
    assert len(whole.spread(19).values) == 19


def test_the_scale_is_the_deviation_unless_the_values_are_alike() -> None:
    assert observed(draws(4), np.array([1.0, 1, 3, 3])).scale == 1.0
    assert observed(draws(4), np.array([1.0, 1, 2, 2])).scale == 0.5
    assert observed(draws(4), np.array([5.0, 5, 5, 5])).scale == 1.0
    assert observed(draws(2), np.array([0.0, 1e-13])).scale == 1.0
    assert observed(draws(2), 1e6 + np.array([0.0, 1e-7])).scale == 1.0
    assert observed(draws(2), 1e6 + np.array([0.0, 1e-3])).scale == pytest.approx(5e-4, rel=1e-3)


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0, 2.0], [1e100, 1.0, 2.0]])
def test_odd_values_leave_everything_finite(values: list[float]) -> None:
    model = fit(FeatureMap(BUDGET), observed(draws(len(values)), np.array(values)))
    mean, deviation = model.mean_and_deviation(draws(4, seed=1))
    assert np.isfinite(mean).all() and np.isfinite(deviation).all()


@pytest.mark.parametrize(
    "budget",
    [ExpertBudget(1, 3), ExpertBudget(2, 4), ExpertBudget(3, 6, 2, 2), ExpertBudget(2, 1, 0, 1)],
)
def test_tiny_budgets_have_a_model(budget: ExpertBudget) -> None:
    counts = np.array([budget.member(0).experts] * 3)
    model = fit(FeatureMap(budget), observed(counts, np.array([1.0, 2.0, 3.0])))
    assert model.mean(counts)[0] == pytest.approx(2.0, abs=0.5)
