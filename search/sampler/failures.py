"""Bounds learnt from trials that failed, so that a region that always fails is left alone.

What fails for a reason that an allocation can have, most of all memory, fails from some number of
experts on: in the largest layer, wherever it is, or in a particular layer.

Notation: F failed trials, N finished ones, L layers; counts are [F, L] or [N, L] integers.
"""

from __future__ import annotations

import numpy as np

from mola.allocation import ExpertBudget
from search.sampler.moves import Ints

_FEWEST = 3  # failures beyond a number of experts, before it is believed to be the reason
_RATE = 0.75  # of failures beyond it, at least


def without_failures(budget: ExpertBudget, failed: Ints, finished: Ints) -> ExpertBudget:
    """Lower the most experts per layer to below what seems to fail.

    A layer's own bound is learnt from those failures that the largest layer does not explain.
    Failures without such a pattern change nothing, nor do those that would leave no allocation.

    Args:
        budget: the allowed allocations.
        failed: allocations that failed and never finished.
        finished: allocations that finished.
    """
    if len(failed) < _FEWEST:
        return budget
    highs = list(budget.highs)
    most = _limit(failed.max(axis=1), finished.max(axis=1, initial=-1))
    if most is not None:
        highs = [min(high, most - 1) for high in highs]
        failed = failed[failed.max(axis=1) < most]
    for layer in range(budget.num_layers):
        most = _limit(failed[:, layer], finished[:, layer])
        if most is not None:
            highs[layer] = min(highs[layer], most - 1)
    try:
        return ExpertBudget(budget.num_layers, budget.total, budget.lows, highs)
    except ValueError:
        return budget


def _limit(failed: Ints, finished: Ints) -> int | None:
    """Find the number from which on trials fail, None if there is no such pattern.

    Of several the one that explains most failures and fewest successes, and of those the largest.
    """
    best, limit = 0, None
    for most in np.unique(failed).tolist():
        bad, good = int((failed >= most).sum()), int((finished >= most).sum())
        believed = bad >= _FEWEST and bad >= _RATE * (bad + good)
        if believed and bad - good >= best:
            best, limit = bad - good, most
    return limit
