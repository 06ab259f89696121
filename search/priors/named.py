"""The hand-made shapes of the MoLA paper, named by their counts per quarter of the depth.

Source: MoLA, arXiv 2402.08562, section 3: 5555 is uniform; the others are its triangle, inverted
triangle, diamond and hourglass, whose names changed meaning between the paper's versions.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from mola.allocation import Allocation, ExpertBudget

NAMES = ("5555", "2468", "2882", "8642", "8228")


@lru_cache(maxsize=64)  # asked for again and again, with exact fractions per layer
def named(name: str, budget: ExpertBudget) -> Allocation:
    """Scale a named shape to a budget's depth and total.

    The shape is a step function over depth. A layer on a step gets the mean of both sides, so that
    symmetric shapes stay symmetric at any depth. The counts are then scaled to the total and
    rounded to the closest member, which is largest-remainder rounding where no bound is met, and
    exact on 32 layers with 160 experts.

    Args:
        name: one of NAMES.
        budget: gives depth, total and bounds.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in NAMES:
        raise ValueError(f"unknown allocation {name!r}; expected one of {', '.join(NAMES)}")
    shape = [_mean_over(name, layer, budget.num_layers) for layer in range(budget.num_layers)]
    scale = Fraction(budget.total) / sum(shape)
    return budget.project([scale * height for height in shape])


def named_allocations(budget: ExpertBudget) -> dict[Allocation, tuple[str, ...]]:
    """Give the distinct named allocations with their names, 5555 first.

    In a small budget several names can mean the same allocation.
    """
    found: dict[Allocation, tuple[str, ...]] = {}
    for name in NAMES:
        allocation = named(name, budget)
        found[allocation] = (*found.get(allocation, ()), name)
    return found


def _mean_over(name: str, layer: int, num_layers: int) -> Fraction:
    """Average the shape's step function over one layer's share of the depth."""
    steps = len(name)
    height = Fraction(0)
    for step, digit in enumerate(name):
        # in units of 1 / (steps * num_layers) of the depth
        overlap = min((layer + 1) * steps, (step + 1) * num_layers) - max(
            layer * steps, step * num_layers
        )
        height += int(digit) * max(overlap, 0)
    return height / steps
