"""Give the fresh seeds to those who can still win: drop what is clearly behind the leader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mola.allocation import Allocation
from studies.stats import compare

BLOCKS = 2
"""Fresh seeds that everybody runs on; one says nothing about the noise."""


def still_racing(
    values: Mapping[Allocation, Mapping[int, float]],
    field: Sequence[Allocation],
    done: Sequence[int],
    uniform: Allocation,
    confidence: float,
) -> list[Allocation]:
    """Choose who runs on the next fresh seed.

    Who is worse than the leader on the seeds so far, by an interval that holds for the whole field
    together, drops out. Uniform never does: the claim is about the difference to it.

    Args:
        values: Objectives by allocation and seed.
        field: Who set out, in order.
        done: The fresh seeds so far. With fewer than BLOCKS nobody drops out.
        uniform: The uniform allocation.
        confidence: Of the intervals, 0 to 1.

    Returns:
        The part of the field that finished on all seeds so far and is not clearly behind.
    """
    if len(done) < BLOCKS:
        return list(field)
    racing = {a: {s: values[a][s] for s in done} for a in field if set(done) <= set(values[a])}
    if len(racing) < 2:
        return list(racing)
    leader = min(racing, key=lambda a: (sum(racing[a].values()), a))
    rows = compare(racing, leader, confidence=confidence, comparisons=max(1, len(field) - 1))
    behind = {row.allocation for row in rows if row.low > 0} - {uniform}
    return [a for a in racing if a not in behind]
