"""Compare the winners of several budgets: how many experts still pay.

All budgets' trials share data order and initial experts by seed, so that allocations of different
totals are pairs on the same seeds like those of one total. Claims rest on the fresh seeds alone.

Notation: B budgets, A allocations that finished on all common seeds, S of these seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import optuna

from mola.allocation import Allocation
from search.budgets.members import PARAMETERS_ATTR
from search.conclude import CONFIDENCE, measured
from search.report.findings import Findings, read_findings
from studies.stats import compare

Values = Mapping[Allocation, Mapping[int, float]]


@dataclass(frozen=True)
class Difference:
    """A paired difference on the common seeds; negative is better.

    Attributes:
        mean: In the objective's unit.
        low: Lower end of its interval; None: the seeds do not suffice for one.
        high: Upper end; None likewise.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def gains(self) -> bool:
        """Whether the interval lies below zero."""
        return self.high is not None and self.high < 0


@dataclass(frozen=True)
class Point:
    """An allocation that finished on all common seeds.

    Attributes:
        allocation: What it is.
        name: What people call it.
        parameters: That it trains, counted as the paper does (`mola.count`).
        mean: Objective, mean over the common seeds.
        to_base: Difference to the smallest budget's uniform; None: that is not known.
    """

    allocation: Allocation
    name: str
    parameters: int
    mean: float
    to_base: Difference | None


@dataclass(frozen=True)
class Budget:
    """One budget.

    Attributes:
        findings: Its study.
        winner: The best so far; None if it did not finish on the common seeds.
        uniform: Likewise.
        others: The other allocations that did.
    """

    findings: Findings
    winner: Point | None
    uniform: Point | None
    others: tuple[Point, ...]

    @property
    def total(self) -> int:
        """Experts over all layers."""
        return self.findings.spec.total


@dataclass(frozen=True)
class Step:
    """From one budget to a larger one.

    Attributes:
        low: The smaller budget's experts.
        high: The larger one's.
        winners: Difference between the winners, whose interval allows for the choice of both.
        uniform: Difference between the uniform allocations, which no result has chosen.
    """

    low: int
    high: int
    winners: Difference | None
    uniform: Difference | None


@dataclass(frozen=True)
class Budgets:
    """A search over several budgets as it stands.

    Attributes:
        name: What the studies' names begin with.
        members: The smallest first.
        seeds: On which all are compared; the fresh ones that all members share.
        fresh: Whether these are fresh seeds; else they are the search's own, which chose.
        steps: From each budget to the next, and, of more than two, from the first to the last.
    """

    name: str
    members: tuple[Budget, ...]
    seeds: tuple[int, ...]
    fresh: bool
    steps: tuple[Step, ...]

    @property
    def unit(self) -> str:
        """Of the objective."""
        return self.members[0].findings.spec.objective

    @property
    def pareto(self) -> list[Point]:
        """The winners that no smaller or equal number of parameters equals, the smallest first."""
        winners = [m.winner for m in self.members if m.winner is not None]
        best: list[Point] = []
        for point in sorted(winners, key=lambda p: (p.parameters, p.mean)):
            if not best or point.mean < best[-1].mean:
                best.append(point)
        return best


def read_budgets(name: str, studies: Sequence[optuna.Study]) -> Budgets:
    """Compare the studies of a search over several budgets, finished or not.

    Args:
        name: of the search.
        studies: at least one, the smallest budget first; see `find_members`.

    Raises:
        ValueError: a study was made by another version.
    """
    found = [read_findings(study) for study in studies]
    counts = [study.user_attrs[PARAMETERS_ATTR] for study in studies]
    shared = [s for s in found[0].conclusion["fresh_seeds"] if _all_have(s, found)]
    seeds = tuple(shared) or (found[0].spec.seed,)
    values = [_on(seeds, findings) for findings in found]
    base = found[0].uniform
    everything = {a: v for by_allocation in values for a, v in by_allocation.items()}
    to_base = _differences(everything, base, max(1, len(everything) - 1))
    members = tuple(
        _member(findings, count, own, to_base)
        for findings, count, own in zip(found, counts, values, strict=True)
    )
    return Budgets(name, members, seeds, bool(shared), _steps(members, values, everything))


def _all_have(seed: int, found: Sequence[Findings]) -> bool:
    return all(seed in findings.conclusion["fresh_seeds"] for findings in found)


def _on(seeds: Sequence[int], findings: Findings) -> Values:
    """Collect the objectives of the allocations that finished on all the seeds, on these alone."""
    return {
        allocation: {seed: by_seed[seed] for seed in seeds}
        for allocation, by_seed in measured(findings.trials).items()
        if set(seeds) <= set(by_seed)
    }


def _member(
    findings: Findings,
    parameters: Sequence[int],
    values: Values,
    to_base: Mapping[Allocation, Difference],
) -> Budget:
    def point(allocation: Allocation, name: str) -> Point:
        trained = sum(n * p for n, p in zip(allocation.experts, parameters, strict=True))
        by_seed = values[allocation]
        mean = sum(by_seed.values()) / len(by_seed)
        return Point(allocation, name, trained, mean, to_base.get(allocation))

    names = {Allocation(r["experts"]): r for r in findings.conclusion["table"]}
    points = {a: point(a, findings.called(a, names[a]["trial"])) for a in values if a in names}
    best = None if findings.winner is None else Allocation(findings.winner["experts"])
    others = tuple(p for a, p in points.items() if a not in (best, findings.uniform))
    return Budget(
        findings, None if best is None else points.get(best), points.get(findings.uniform), others
    )


def _steps(
    members: Sequence[Budget], values: Sequence[Values], everything: Values
) -> tuple[Step, ...]:
    """Compare budgets two by two, with intervals that hold together.

    A winner is one of the allocations that might have won, so that the difference between two
    winners is one of as many as there are pairs of these; the uniform ones were chosen by nobody.
    """
    places = list(pairwise(range(len(members))))
    if len(members) > 2:
        places.append((0, len(members) - 1))
    pairs = sum(len(values[i]) * len(values[j]) for i, j in places)
    steps = []
    for i, j in places:
        low, high = members[i], members[j]
        steps.append(
            Step(
                low.total,
                high.total,
                _between(everything, low.winner, high.winner, pairs),
                _between(everything, low.uniform, high.uniform, len(places)),
            )
        )
    return tuple(steps)


def _between(
    everything: Values, low: Point | None, high: Point | None, comparisons: int
) -> Difference | None:
    if low is None or high is None:
        return None
    return _differences(everything, low.allocation, comparisons)[high.allocation]


def _differences(
    values: Values, reference: Allocation, comparisons: int
) -> dict[Allocation, Difference]:
    if reference not in values:
        return {}
    rows = compare(values, reference, confidence=CONFIDENCE, comparisons=comparisons)
    return {
        row.allocation: Difference(row.difference, _finite(row.low), _finite(row.high))
        for row in rows
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
