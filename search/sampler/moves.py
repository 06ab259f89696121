"""The allocations that are still free, and moves of experts between layers.

Notation: L layers, M allocations; counts are [L] or [M, L] integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from mola.allocation import Allocation, ExpertBudget

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MOST_MOVES = 600  # of the L (L - 1) possible ones, looked at in one step of a climb
_MOST_STEPS = 40


class Space:
    """A budget, less the allocations that are taken."""

    def __init__(self, budget: ExpertBudget, taken: Collection[Allocation]) -> None:
        self.budget = budget
        self.lows = np.array(budget.lows)
        self.highs = np.array(budget.highs)
        self._taken = {allocation.experts for allocation in taken}

    def first_free(self, ranked: Ints, rng: np.random.Generator) -> Allocation:
        """Give the first of the ranked allocations [M, L] that is free.

        If none is, give a free neighbour of the first, and without one any free allocation, of
        which there must be one.
        """
        for counts in ranked.tolist():
            if tuple(counts) not in self._taken:
                return Allocation(counts)
        for near in self.budget.neighbours(Allocation(ranked[0].tolist())):
            if near.experts not in self._taken:
                return near
        size = self.budget.size()
        rank = int(rng.integers(min(size, 2**62)))
        while self.budget.member(rank).experts in self._taken:
            rank = (rank + 1) % size
        return self.budget.member(rank)

    def moves(
        self, counts: Ints, rng: np.random.Generator, *, experts: int = 1, most: int = _MOST_MOVES
    ) -> Ints:
        """Move experts from one layer to another, as many as wanted or as the bounds allow.

        Returns:
            [M, L] all such allocations, or `most` random ones of them.
        """
        possible = np.outer(counts > self.lows, counts < self.highs)
        np.fill_diagonal(possible, False)
        source, target = np.nonzero(possible)
        if len(source) > most:
            some = rng.choice(len(source), most, replace=False)
            source, target = source[some], target[some]
        room = np.minimum(counts - self.lows, experts)[source]
        size = np.minimum(room, (self.highs - counts)[target])
        rows = np.arange(len(source))
        moved = np.repeat(counts[None], len(rows), axis=0)
        moved[rows, source] -= size
        moved[rows, target] += size
        return moved

    def descend(
        self, value: Callable[[Ints], Floats], counts: Ints, rng: np.random.Generator
    ) -> Ints:
        """Move single experts, each time the one that pays most, until none lowers the value."""
        reached = value(counts[None])[0]
        for _ in range(_MOST_STEPS):
            moved = self.moves(counts, rng)
            if not len(moved):
                break
            values = value(moved)
            if values.min() >= reached - 1e-9 * abs(reached):  # below the rounding of the values
                break
            counts, reached = moved[values.argmin()], values.min()
        return counts

    def rounded(self, wanted: Floats) -> Ints:
        """Round real counts [M, L] to members of the budget close to them.

        One shift per row brings the total about; what rounding down leaves goes to the layers with
        the largest remainders. Many rows at once, in floats; `ExpertBudget.project` is the exact
        form.
        """
        down = self.lows.min() - wanted.max(axis=1) - 1.0
        up = self.highs.max() - wanted.min(axis=1) + 1.0
        for _ in range(60):  # bisection, until float64 is exhausted
            shift = (down + up) / 2
            over = np.clip(wanted + shift[:, None], self.lows, self.highs).sum(axis=1)
            up = np.where(over > self.budget.total, shift, up)
            down = np.where(over > self.budget.total, down, shift)
        exact = np.clip(wanted + down[:, None], self.lows, self.highs)
        counts: Ints = np.floor(exact + 1e-9).astype(np.int64)
        remainders = np.where(counts < self.highs, exact - counts, -np.inf)
        missing = self.budget.total - counts.sum(axis=1, keepdims=True)
        order = np.argsort(-remainders, axis=1, kind="stable")
        counts += np.argsort(order, axis=1, kind="stable") < missing
        return counts


def best_additive(tables: Floats, budget: ExpertBudget, first: int) -> Ints:
    """Minimise sums of one table per layer over a budget, exactly, by dynamic programming.

    Args:
        tables: [..., L, V], the value of layer l with first + v experts.
        budget: the allowed allocations.
        first: number of experts that column 0 stands for.

    Returns:
        [..., L] experts per layer.
    """
    outer = tables.shape[:-2]
    rest = budget.total - sum(budget.lows)
    value = np.full((*outer, rest + 1), np.inf)  # of placing 0..rest experts in the layers so far
    value[..., 0] = 0.0
    choices = np.zeros((budget.num_layers, *outer, rest + 1), dtype=np.int64)
    for layer, (low, high) in enumerate(zip(budget.lows, budget.highs, strict=True)):
        costs = tables[..., layer, low - first : high - first + 1]
        best = value + costs[..., :1]
        for extra in range(1, min(high - low, rest) + 1):
            moved = value[..., : rest + 1 - extra] + costs[..., extra, None]
            better = moved < best[..., extra:]
            best[..., extra:] = np.where(better, moved, best[..., extra:])
            choices[layer, ..., extra:] = np.where(better, extra, choices[layer, ..., extra:])
        value = best
    counts = np.empty((*outer, budget.num_layers), dtype=np.int64)
    left = np.full((*outer, 1), rest)
    for layer in reversed(range(budget.num_layers)):
        chosen = np.take_along_axis(choices[layer], left, axis=-1)
        counts[..., layer] = budget.lows[layer] + chosen[..., 0]
        left -= chosen
    return counts
