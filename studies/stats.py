"""Compare allocations over seeds: a randomised block design, the seeds being the blocks.

Notation: A allocations, S seeds, y[a, s] the objective. The model is y[a, s] = m + alpha_a +
beta_s + noise. Seeds move every allocation alike (beta), so differences are taken within a seed;
the noise is pooled over all allocations, since a few seeds of two of them say little about it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mola.allocation import Allocation


@dataclass(frozen=True)
class Comparison:
    """An allocation against the reference; all numbers are in the objective's unit.

    Attributes:
        allocation: What is compared.
        mean: Mean objective over the seeds.
        standard_error: Of `mean`, from the spread over the seeds; infinite with one seed.
        seeds: Number of seeds.
        difference: Mean of (this - reference) within the seeds; negative is better.
        low: Lower end of the difference's interval; minus infinity with one seed.
        high: Upper end; infinite with one seed.
    """

    allocation: Allocation
    mean: float
    standard_error: float
    seeds: int
    difference: float
    low: float
    high: float


def compare(
    values: Mapping[Allocation, Mapping[int, float]],
    reference: Allocation,
    *,
    confidence: float = 0.95,
    comparisons: int | None = None,
) -> list[Comparison]:
    """Compare each allocation with a reference by simultaneous intervals.

    The interval is difference +- t * sqrt(2 MSE / S), where MSE is the residual mean square with
    (A - 1)(S - 1) degrees of freedom and t the quantile at 1 - (1 - confidence) / 2 / comparisons
    (Bonferroni). With two allocations this is the paired t interval.

    Args:
        values: The objective by allocation and seed. Seeds that any allocation lacks are left
            out: only complete blocks cancel the seeds' effect.
        reference: The allocation to compare with, one of `values`.
        confidence: Probability with which all intervals hold together, 0 to 1.
        comparisons: Number of differences that the claim may be picked from; None is A - 1.

    Returns:
        One comparison per allocation, the reference included, lowest mean first.

    Raises:
        ValueError: The reference is missing, no seed is common to all, a value is not finite, or
            `confidence` or `comparisons` is out of range.

    Source:
        Standard analysis of variance of a randomised complete block design.
    """
    if reference not in values:
        raise ValueError(f"the reference {reference} has no values to compare with")
    if not 0 < confidence < 1 or (comparisons is not None and comparisons < 1):
        raise ValueError(
            f"confidence={confidence} must be between 0 and 1 and comparisons={comparisons} "
            "at least 1"
        )
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in values.values())))
    if not seeds:
        raise ValueError("no seed was run by all allocations, so nothing can be compared")
    allocations = list(values)
    y = np.array([[values[a][s] for s in seeds] for a in allocations], dtype=np.float64)  # [A, S]
    if not np.isfinite(y).all():
        raise ValueError("an objective is not finite; leave failed trials out of the comparison")
    noise = math.sqrt(_residual_mean_square(y))
    margin = resolution(noise, *y.shape, confidence=confidence, comparisons=comparisons)
    base = y[allocations.index(reference)]
    rows = []
    for allocation, row in zip(allocations, y, strict=True):
        difference = float((row - base).mean())
        half = 0.0 if allocation == reference else margin
        rows.append(
            Comparison(
                allocation=allocation,
                mean=float(row.mean()),
                standard_error=_standard_error(row),
                seeds=len(seeds),
                difference=difference,
                low=difference - half,
                high=difference + half,
            )
        )
    return sorted(rows, key=lambda row: (row.mean, row.allocation))


@dataclass(frozen=True)
class Spread:
    """How far allocations lie apart, and how far a measurement lies from what it measures.

    Attributes:
        signal: Standard deviation between allocations, the noise taken out.
        noise: Standard deviation of one measurement, the seeds' common effect taken out.
    """

    signal: float
    noise: float


def spread(values: Mapping[Allocation, Mapping[int, float]]) -> Spread | None:
    """Split the differences between allocations into signal and noise.

    Args:
        values: The objective by allocation and seed. The allocations must not have been chosen by
            these values: a winner's are better than it is.

    Returns:
        None with fewer than two allocations or two seeds that all of them have.

    Source:
        The variance components of a randomised complete block design.
    """
    seeds = sorted(set.intersection(*(set(v) for v in values.values()))) if values else []
    if len(values) < 2 or len(seeds) < 2:
        return None
    y = np.array([[by_seed[s] for s in seeds] for by_seed in values.values()])  # [A, S]
    noise = _residual_mean_square(y)
    between = float(y.mean(axis=1).var(ddof=1)) - noise / len(seeds)
    return Spread(signal=math.sqrt(max(0.0, between)), noise=math.sqrt(noise))


def resolution(
    noise: float,
    allocations: int,
    seeds: int,
    *,
    confidence: float = 0.95,
    comparisons: int | None = None,
) -> float:
    """Say how wide an interval of `compare` is to either side: smaller differences are not told.

    Args:
        noise: Standard deviation of what allocations and seeds leave unexplained.
        allocations: Number of them that are compared.
        seeds: Number of seeds.
        confidence: See `compare`.
        comparisons: See `compare`.

    Returns:
        Half the width, in the unit of the noise; infinite with one allocation or one seed.
    """
    df = (allocations - 1) * (seeds - 1)
    if df == 0:
        return math.inf
    tail = (1 - confidence) / 2 / (comparisons or max(1, allocations - 1))
    return t_quantile(1 - tail, df) * noise * math.sqrt(2 / seeds)


def t_quantile(p: float, df: int) -> float:
    """Invert the distribution function of Student's t for whole degrees of freedom.

    With theta = atan(t / sqrt(df)) the function is a finite sum of powers of cos(theta), so that
    bisection over theta needs no special functions (and this package no SciPy).

    Args:
        p: Probability, 0.5 to 1, both left out.
        df: Degrees of freedom, at least 1.

    Raises:
        ValueError: An argument is out of range.

    Source:
        Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    if not 0.5 < p < 1 or df < 1:
        raise ValueError(f"expected 0.5 < p < 1 and df >= 1, got p={p}, df={df}")
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        if (1 + _t_central(middle, df)) / 2 < p:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan(low)


def _t_central(theta: float, df: int) -> float:
    """Give the probability that |t| <= sqrt(df) tan(theta)."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = df % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, df, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    if odd:
        return 2 / math.pi * (theta + sine * total)
    return sine * total


def _residual_mean_square(y: np.ndarray) -> float:
    """Give the mean square of what allocations and seeds leave unexplained; y: [A, S].

    Nothing is left with one allocation or one seed.
    """
    residuals = y - y.mean(axis=1, keepdims=True) - y.mean(axis=0, keepdims=True) + y.mean()
    df: int = (y.shape[0] - 1) * (y.shape[1] - 1)
    return float((residuals**2).sum()) / max(1, df)


def _standard_error(row: np.ndarray) -> float:
    if row.size < 2:
        return math.inf
    return float(row.std(ddof=1)) / math.sqrt(row.size)
