"""Turn a score per layer into an allocation of a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from mola.allocation import Allocation, ExpertBudget


def allocate(scores: Sequence[float], budget: ExpertBudget) -> Allocation:
    """Hand out experts in proportion to scores, within a budget's bounds.

    The wanted number of layer l is `c * score_l`, cut to the layer's bounds, with the one c for
    which these numbers sum to the total: layers that meet a bound leave the proportions of the
    others as they are. The numbers are then rounded to the closest member of the budget, which is
    largest-remainder rounding, ties to the lower layer. If the layers with a score are full, the
    rest is shared out evenly. All arithmetic is rational, so the result is exact.

    Args:
        scores: one per layer, 0 or more and not all 0; their scale does not matter.
        budget: gives depth, total and bounds.

    Raises:
        ValueError: the scores are not that, or not one per layer.
    """
    weights = [Fraction(score) for score in check_scores(scores, budget.num_layers)]
    bounds = list(zip(budget.lows, budget.highs, strict=True))

    def wanted(scale: Fraction) -> list[Fraction]:
        return [
            min(max(scale * w, Fraction(low)), Fraction(high))
            for w, (low, high) in zip(weights, bounds, strict=True)
        ]

    # The sum of the wanted numbers rises with the scale, in straight pieces between these ends.
    ends = sorted(
        {Fraction(b) / w for w, pair in zip(weights, bounds, strict=True) if w for b in pair}
    )
    below = Fraction(0)
    for end in ends:
        least, most = sum(wanted(below), Fraction(0)), sum(wanted(end), Fraction(0))
        if most >= budget.total:
            share = (budget.total - least) / (most - least) if most > least else Fraction(1)
            return budget.project(wanted(below + share * (end - below)))
        below = end
    return budget.project(wanted(below))


def check_scores(scores: Sequence[float], num_layers: int) -> list[float]:
    """Check that there is a usable score for each layer.

    Raises:
        ValueError: says which score is wrong.
    """
    if len(scores) != num_layers:
        raise ValueError(f"expected {num_layers} scores, one per layer, got {len(scores)}")
    numbers = []
    for layer, score in enumerate(scores):
        if isinstance(score, bool) or not isinstance(score, (int, float)):
            raise ValueError(f"the score of layer {layer} must be a number, got {score!r:.40}")
        try:
            number = float(score)
        except OverflowError:  # an integer beyond all floats
            number = math.inf
        if not math.isfinite(number) or number < 0:
            raise ValueError(f"the score of layer {layer} must be 0 or more, got {number}")
        numbers.append(number)
    if not any(numbers):
        raise ValueError("all scores are 0; at least one layer needs a higher one")
    return numbers
