"""Allocations of experts to layers, and the set of allocations that a budget allows.

Notation: L layers, n_l experts in layer l (layer 0 first), total = n_0 + ... + n_{L-1}.
"""

from __future__ import annotations

import heapq
import math
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import groupby

import numpy as np

MAX_EXPERTS = 4096  # of a layer; this and the next two, so that a mistyped or hostile number
_MAX_LAYERS = 10_000  # cannot fill the memory
_MAX_CELLS = 2_000_000  # of the table by which a budget counts its members
_TERM = re.compile(r"(\d+)(?:x(\d+))?", re.ASCII)


@dataclass(frozen=True, order=True, init=False)
class Allocation:
    """A number of experts for each layer.

    Allocations are immutable, hashable and ordered like their tuples of counts.

    Args:
        experts: number of experts per layer, layer 0 first; any sequence of integers (NumPy's
            too), kept as a tuple of Python ints. 0 leaves a layer frozen, 1 is plain LoRA.

    Raises:
        ValueError: there is no layer, or a count is not an integer of 0 to `MAX_EXPERTS`.
    """

    experts: tuple[int, ...]

    def __init__(self, experts: Sequence[int] | np.ndarray) -> None:
        if isinstance(experts, (str, bytes)):
            raise ValueError(
                f"experts must be a sequence of integers, not the text {experts!r:.80}; "
                "use Allocation.parse for text"
            )
        counts = tuple(experts)
        plain = set(map(type, counts)) == {int}
        if not plain or min(counts) < 0 or max(counts) > MAX_EXPERTS:
            counts = tuple(
                _count(f"experts of layer {i}", n, MAX_EXPERTS) for i, n in enumerate(counts)
            )
        if not counts:
            raise ValueError("an allocation needs at least one layer, but experts is empty")
        object.__setattr__(self, "experts", counts)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a sampler asks for those of all trials, for each proposal
        return hash(self.experts)

    @property
    def total(self) -> int:
        """Number of experts over all layers."""
        return sum(self.experts)

    @property
    def num_layers(self) -> int:
        """Number of layers, those without experts included."""
        return len(self.experts)

    @classmethod
    def parse(cls, text: str) -> Allocation:
        """Read an allocation from text.

        Args:
            text: counts separated by commas or spaces, brackets allowed; `2x8` stands for eight
                layers with 2 experts each: `2,2,4`, `[2, 2, 4]`, `2x8 4x8 6x8 8x8`.

        Raises:
            ValueError: the text is none of these.
        """
        stripped = text.strip()
        if stripped.startswith("[") and stripped.endswith("]"):
            stripped = stripped[1:-1].strip()
        terms = re.split(r"\s*,\s*|\s+", stripped) if stripped else []
        counts: list[int] = []
        for term in terms:
            match = _TERM.fullmatch(term)
            layers = int(match[2] or 1) if match else 0
            if match is None or layers == 0:
                raise ValueError(
                    f"{term!r:.40} in the allocation {text!r:.80} is not a count of experts; "
                    "expected '2,2,4' or '2x8 4x8', where 2x8 means eight layers with 2 experts "
                    "each"
                )
            if len(counts) + layers > _MAX_LAYERS:
                raise ValueError(f"the allocation {text!r:.80} has more than {_MAX_LAYERS} layers")
            counts += [int(match[1])] * layers
        if not counts:
            raise ValueError(f"the allocation {text!r} is empty; expected '2,2,4' or '2x8 4x8'")
        return cls(counts)

    def __str__(self) -> str:
        """Give the run-length form, `2x8 4x8 6x8 8x8`, which `parse` reads; `3x1` is cut to `3`."""
        runs = [(n, len(list(same))) for n, same in groupby(self.experts)]
        return " ".join(f"{n}x{layers}" if layers > 1 else f"{n}" for n, layers in runs)


@dataclass(frozen=True, init=False)
class ExpertBudget:
    """The set of allocations with a given total and bounds per layer.

    Args:
        num_layers: number of layers.
        total: number of experts over all layers.
        low: fewest experts in a layer; one number, or one per layer.
        high: most experts in a layer, likewise; None means twice the mean, rounded up.

    `low` and `high` are kept in their shortest form (one int where all layers agree), so that
    equal sets of bounds compare equal.

    Raises:
        ValueError: an argument is not a count, no allocation satisfies them all, or there are so
            many that they cannot be counted.
    """

    num_layers: int
    total: int
    low: int | tuple[int, ...]
    high: int | tuple[int, ...]

    def __init__(
        self,
        num_layers: int,
        total: int,
        low: int | Sequence[int] = 1,
        high: int | Sequence[int] | None = None,
    ) -> None:
        num_layers = _count("num_layers", num_layers)
        total = _count("total", total)
        if not 1 <= num_layers <= _MAX_LAYERS:
            raise ValueError(f"num_layers must be 1 to {_MAX_LAYERS}, got {num_layers}")
        lows = _per_layer("low", low, num_layers)
        twice_the_mean = min(-(-2 * total // num_layers), MAX_EXPERTS)
        highs = _per_layer("high", twice_the_mean if high is None else high, num_layers)
        _check_reach(total, lows, None if high is None and total <= sum(highs) else highs)
        for layer, (fewest, most) in enumerate(zip(lows, highs, strict=True)):
            if fewest > most:
                source = " (twice the mean, as high was not given)" if high is None else ""
                raise ValueError(
                    f"layer {layer} has low={fewest} above high={most}{source}; "
                    "change --min-experts or --max-experts"
                )
        free = total - sum(lows)
        if num_layers * (free + 1) > _MAX_CELLS:
            raise ValueError(
                f"total={_shown(total)} leaves {_shown(free)} experts to place in {num_layers} "
                f"layers, and more than {_MAX_CELLS // num_layers} are too many; lower --budget or "
                "raise --min-experts"
            )
        for name, value in (
            ("num_layers", num_layers),
            ("total", total),
            ("low", _shortest(lows)),
            ("high", _shortest(highs)),
        ):
            object.__setattr__(self, name, value)

    @property
    def lows(self) -> tuple[int, ...]:
        """Fewest experts of each layer."""
        return self.low if isinstance(self.low, tuple) else (self.low,) * self.num_layers

    @property
    def highs(self) -> tuple[int, ...]:
        """Most experts of each layer."""
        return self.high if isinstance(self.high, tuple) else (self.high,) * self.num_layers

    def __contains__(self, allocation: object) -> bool:
        return (
            isinstance(allocation, Allocation)
            and allocation.num_layers == self.num_layers
            and allocation.total == self.total
            and all(map(operator.le, self.lows, allocation.experts))
            and all(map(operator.le, allocation.experts, self.highs))
        )

    def size(self) -> int:
        """Count the allocations in the budget, exactly."""
        return _completions(*self._steps())[0][-1]

    def member(self, rank: int) -> Allocation:
        """Give the allocation at a place of the budget, in ascending order of the counts.

        Args:
            rank: 0 to size() - 1.

        Raises:
            ValueError: the rank is outside that range.
        """
        room, rest = self._steps()
        table = _completions(room, rest)
        if not 0 <= rank < table[0][-1]:
            raise ValueError(f"rank must be 0 to {table[0][-1] - 1}, got {rank}")
        experts = []
        for layer, low in enumerate(self.lows):
            following, extra = table[layer + 1], 0
            while rank >= following[rest - extra]:
                rank -= following[rest - extra]
                extra += 1
            rest -= extra
            experts.append(low + extra)
        return Allocation(experts)

    def uniform(self, rng: np.random.Generator) -> Allocation:
        """Draw an allocation, each member of the budget with exactly the same probability."""
        return self.member(_below(self.size(), rng))

    def project(self, weights: Sequence[float | Fraction] | np.ndarray) -> Allocation:
        """Find the member closest to real numbers of experts in Euclidean distance.

        Raising n_l by one adds 2 (n_l - w_l) + 1 to the squared distance, more the larger n_l is,
        so handing out the experts one by one where they cost least is exact. The arithmetic is
        rational, without rounding. Equally close members: the lower layers get the experts.

        Args:
            weights: wanted number of experts per layer, any finite real numbers.

        Raises:
            ValueError: the weights are not L finite numbers.
        """
        wanted = [_finite(layer, w) for layer, w in enumerate(weights)]
        if len(wanted) != self.num_layers:
            raise ValueError(
                f"expected {self.num_layers} weights, one per layer, got {len(wanted)}"
            )
        experts, highs = list(self.lows), self.highs
        costs = [
            (n - w, layer)
            for layer, (n, w) in enumerate(zip(experts, wanted, strict=True))
            if n < highs[layer]
        ]
        heapq.heapify(costs)
        for _ in range(self.total - sum(experts)):
            cost, layer = costs[0]
            experts[layer] += 1
            if experts[layer] < highs[layer]:
                heapq.heapreplace(costs, (cost + 1, layer))
            else:
                heapq.heappop(costs)
        return Allocation(experts)

    def neighbours(self, allocation: Allocation) -> Iterator[Allocation]:
        """Yield the members that differ from an allocation by one expert moved between layers."""
        experts = allocation.experts
        for source, most in enumerate(experts):
            for target, fewest in enumerate(experts):
                if source == target or most <= self.lows[source] or fewest >= self.highs[target]:
                    continue
                moved = list(experts)
                moved[source] -= 1
                moved[target] += 1
                yield Allocation(moved)

    def _steps(self) -> tuple[tuple[int, ...], int]:
        """Give how far each layer can rise above its low, and how many experts rise in all."""
        room = tuple(b - a for a, b in zip(self.lows, self.highs, strict=True))
        return room, self.total - sum(self.lows)


@lru_cache(maxsize=8)
def _completions(room: tuple[int, ...], rest: int) -> list[list[int]]:
    """Count the ways to place experts in the last layers.

    Returns:
        table[l][k] for l in 0..L and k in 0..rest: the number of ways to place k experts in the
        layers from l on, at most room[i] in layer i. Python ints, so the counts are exact.
    """
    table = [[1] + [0] * rest]
    for most in reversed(room):
        following, row, window = table[-1], [], 0
        for k in range(rest + 1):
            window += following[k] - (following[k - most - 1] if k > most else 0)
            row.append(window)
        table.append(row)
    return table[::-1]


def _below(size: int, rng: np.random.Generator) -> int:
    """Draw an integer uniformly from 0..size-1, of any size, by rejection."""
    bits = (size - 1).bit_length()
    octets = (bits + 7) // 8
    while True:
        draw = int.from_bytes(rng.bytes(octets), "big") >> (8 * octets - bits)
        if draw < size:
            return draw


def _count(name: str, value: object, most: int | None = None) -> int:
    """Give a count as a Python int; bools and floats are refused, even whole ones."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if number < 0:
        raise ValueError(f"{name} must be at least 0, got {_shown(number)}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {_shown(number)}")
    return int(number)


def _shown(number: int) -> str:
    """Write a number; Python refuses to write one of thousands of digits."""
    return str(number) if abs(number) < 10**30 else "a number of more than 30 digits"


def _per_layer(name: str, value: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Spread one bound over the layers, or check that there is one per layer."""
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, (str, bytes)):
        return (_count(name, value, MAX_EXPERTS),) * num_layers
    bounds = tuple(_count(f"{name} of layer {i}", n, MAX_EXPERTS) for i, n in enumerate(value))
    if len(bounds) != num_layers:
        raise ValueError(
            f"{name} must be one number or one per layer: expected {num_layers}, got {len(bounds)}"
        )
    return bounds


def _shortest(bounds: tuple[int, ...]) -> int | tuple[int, ...]:
    return bounds[0] if len(set(bounds)) == 1 else bounds


def _check_reach(total: int, lows: tuple[int, ...], highs: tuple[int, ...] | None) -> None:
    """Refuse a total that the bounds cannot sum to; highs=None: there is no upper bound."""
    least = sum(lows)
    if least <= total and (highs is None or total <= sum(highs)):
        return
    if highs is None:
        bounds, reach = f"at least {_span(lows)} experts each", f"{least} or more"
    else:
        bounds, reach = (
            f"{_span(lows)} to {_span(highs)} experts each",
            f"{least} to {sum(highs)}",
        )
    raise ValueError(
        f"total={total} is out of reach for {len(lows)} layers with {bounds} ({reach}); "
        "change --budget, --min-experts or --max-experts"
    )


def _span(bounds: tuple[int, ...]) -> str:
    least, most = min(bounds), max(bounds)
    return f"{least}" if least == most else f"{least}-{most}"


def _finite(layer: int, weight: float | Fraction) -> Fraction:
    """Give a weight as an exact fraction."""
    if isinstance(weight, Fraction):
        return weight
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"weight of layer {layer} must be a finite number, got {weight!r}")
    return Fraction(number)
