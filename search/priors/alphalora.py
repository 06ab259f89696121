"""AlphaLoRA: more experts where the frozen weights' spectra look less well trained.

Notation: eigenvalues of W^T W, the squared singular values of a weight matrix W, ascending:
e_0 <= ... <= e_{N-1}, N = min(d_in, d_out).

For each matrix, PL_Alpha_Hill is the exponent of the power law that fits the tail of the spectrum
best, alpha = 1 + n / sum_{j >= i} ln(e_j / e_i) with n = N - i eigenvalues from the i-th on. The
"fix-finger" rule restricts where the tail may begin to eigenvalues near the peak of the histogram
of log10 e (100 bins), from log10(0.95 peak) to 1.5 peak, where peak is the left edge of the fullest
bin; of these, the tail with the least Kolmogorov-Smirnov distance counts. A layer's alpha is the
mean over its matrices, and its score alpha^2.5.

Departures from the reference code: the eigenvalues are exact (see `spectrum`), those that are zero
to working precision are left out (the reference would take their logarithm), and the scores become
experts by largest remainder (see `search.priors.scores`). The reference rounds each layer by
itself and then corrects the total where alpha^beta minus the count is extreme, two quantities of
different scales, which can pile corrections on one layer. The lower end log10(0.95 peak) compares
a logarithm with an eigenvalue, in the reference as here, because the published alphas rest on it.
It makes alpha depend on the scale of the weights; with 0.95 peak in its place the layers' order
changes little on SmolLM2-135M (rank correlation 0.9996), more on the built-in model (0.86).

Source: AlphaLoRA, arXiv 2410.10054; peijunallin/alphalora, expert_number.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

BETA = 2.5
_BINS = 100


def scores(alphas: Sequence[float]) -> list[float]:
    """Turn the layers' alphas into scores: alpha^2.5, the exponent of the reference."""
    return [alpha**BETA for alpha in alphas]


def layer_alphas(
    weights: Iterable[tuple[int, torch.Tensor]], progress: Callable[[int], None]
) -> list[float]:
    """Compute each layer's mean PL_Alpha_Hill.

    Args:
        weights: number of the layer, ascending, and a weight matrix; see
            `mola.weights.linear_weights`, of which one matrix is held at a time.
        progress: told the number of each layer that is done.

    Raises:
        ValueError: a matrix has no spectrum that a power law could fit.
    """
    alphas = []
    for layer, group in groupby(weights, key=lambda pair: pair[0]):
        alphas.append(float(np.mean([pl_alpha_hill(spectrum(weight)) for _, weight in group])))
        progress(layer)
    return alphas


def spectrum(weight: torch.Tensor) -> NDArray[np.float64]:
    """Compute the eigenvalues of W^T W, ascending, on the CPU.

    They are taken from the smaller Gram matrix in float64, whose error is about 1e-16 of the
    largest eigenvalue. The singular values in float32, which the reference squares, have an error
    of about 1e-7 of the largest, and so its eigenvalues are less exact wherever e / e_max is above
    1e-17. On a random square matrix of 2048 the worst relative errors were 2e-9 and 2e-4, and the
    Gram matrix took two thirds of the time.

    Args:
        weight: [d_out, d_in], of any floating-point dtype.

    Returns:
        [at most min(d_out, d_in)]: without those that are zero to working precision.
    """
    import torch

    matrix = weight.to("cpu", torch.float64)
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    values: NDArray[np.float64] = torch.linalg.eigvalsh(matrix @ matrix.T).numpy()
    noise = len(values) * np.finfo(np.float64).eps * values[-1]
    positive: NDArray[np.float64] = values[values > noise]
    return positive


def pl_alpha_hill(eigenvalues: NDArray[np.float64]) -> float:
    """Fit a power law to the tail of a spectrum by the fix-finger rule; see the module.

    Args:
        eigenvalues: positive, ascending.

    Raises:
        ValueError: there are fewer than two, or those of the tail are all equal.
    """
    if len(eigenvalues) < 2:
        raise ValueError("a weight matrix of rank below 2 has no tail to fit")
    logs = np.log(eigenvalues)
    counts, edges = np.histogram(np.log10(eigenvalues), bins=_BINS)
    peak = 10.0 ** edges[counts.argmax()]
    first = int(np.searchsorted(eigenvalues, np.log10(0.95 * peak)))
    last = int(np.searchsorted(eigenvalues, 1.5 * peak, side="right"))
    starts = range(min(first, len(logs) - 2), min(max(last, first + 1), len(logs) - 1))
    tails = np.cumsum(logs[::-1])[::-1]  # sum of the logarithms from i on
    best, least = 0.0, np.inf
    for start in starts:
        n = len(logs) - start
        excess = tails[start] - n * logs[start]
        if excess <= 0:  # all equal from here on
            continue
        alpha = 1 + n / excess
        fitted = 1 - np.exp((1 - alpha) * (logs[start:] - logs[start]))
        distance = np.abs(fitted - np.arange(n) / n).max()
        if distance < least:
            best, least = alpha, distance
    if least == np.inf:
        raise ValueError("the large singular values of a weight matrix are all equal")
    return float(best)
