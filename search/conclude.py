"""Choose who runs again, name the winner, and say what the fresh seeds support."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from mola.allocation import Allocation
from search.priors.named import named, named_allocations
from search.race import BLOCKS
from studies.records import PRIOR
from studies.spec import StudySpec
from studies.stats import Spread, compare, spread
from studies.store import TrialRecord

CONFIDENCE = 0.95

Values = Mapping[Allocation, Mapping[int, float]]


def fresh_seeds(spec: StudySpec, count: int) -> tuple[int, ...]:
    """Give the seeds of the replicates, none of which selection has seen."""
    return tuple(spec.seed + k for k in range(1, count + 1))


def candidates(
    records: Sequence[TrialRecord],
    spec: StudySpec,
    finalists: int,
    estimates: Mapping[Allocation, float],
) -> list[Allocation]:
    """Choose the allocations to run again: the best finished ones, the named ones and the priors.

    Args:
        records: the study's trials.
        spec: what the study is about.
        finalists: how many of the best are chosen; named ones and priors among them do not come
            on top.
        estimates: objectives with the noise taken out, by which the best are chosen, so that the
            luckiest draw is not; what is missing counts as measured.

    Returns:
        Distinct allocations that finished at the study's own seed; uniform first, so that it is
        measured before what is compared with it.
    """
    own = {
        allocation: seeds[spec.seed]
        for allocation, seeds in measured(records).items()
        if spec.seed in seeds
    }
    ranked = sorted(own, key=lambda a: (estimates.get(a, own[a]), a))
    baselines = [a for a in (*named_allocations(spec.budget), *_priors(records)) if a in own]
    return list(dict.fromkeys([*baselines, *ranked[:finalists]]))


def _priors(records: Sequence[TrialRecord]) -> dict[Allocation, str]:
    """Find the allocations that ran because somebody believed in them, with their names."""
    return {r.allocation: r.label.removeprefix(PRIOR) for r in records if r.label.startswith(PRIOR)}


def measured(records: Sequence[TrialRecord]) -> dict[Allocation, dict[int, float]]:
    """Collect the objectives of trials at full length, by allocation and seed."""
    values: dict[Allocation, dict[int, float]] = defaultdict(dict)
    for record in records:
        if record.state == "COMPLETE" and record.objective is not None:
            values[record.allocation].setdefault(record.seed, record.objective)
    return dict(values)


def conclude(
    records: Sequence[TrialRecord], spec: StudySpec, *, confirm_seeds: int
) -> dict[str, Any]:
    """Name the winner and say whether it is better than uniform.

    The winner has the best mean over the study's own seed and all fresh ones, among the
    allocations that finished on each of them. Its difference to uniform and the interval rest on
    the fresh seeds alone, which selection has not seen; the intervals of all these allocations
    hold together (Bonferroni), as any of them might have won.

    Args:
        records: the study's trials.
        spec: what the study is about.
        confirm_seeds: number of fresh seeds.

    Returns:
        JSON-able: `text`; `winner`, the number of its trial, None if nothing finished; `better`,
        whether the interval excludes zero; `confidence`; `fresh_seeds`; `spread`, the standard
        deviations `signal` and `noise` of the named allocations (None: unknown); and `table`,
        best mean first, a row per allocation: `experts`, `names`, `trial`, `mean` and
        `standard_error` over `seeds` seeds, `accuracy`, the paired `difference`, `low`, `high`
        (None: unknown), and whether it `dropped` out of the race, last, compared on fewer seeds.
    """
    values = measured(records)
    fresh = fresh_seeds(spec, confirm_seeds)
    confirmed = {a: v for a, v in values.items() if {spec.seed, *fresh} <= set(v)}
    field = confirmed or {a: v for a, v in values.items() if spec.seed in v}
    fresh = fresh if confirmed else ()
    dropped = _dropped(values, confirmed, (spec.seed, *fresh)) if fresh else {}
    uniform = named("5555", spec.budget)
    sums = _Rows(records, spec)
    table = [sums.row(a, (spec.seed, *fresh)) for a in field]
    table.sort(key=lambda row: (row["mean"], row["experts"]))
    table += [sums.row(a, seeds, dropped=True) for a, seeds in dropped.items()]
    others = max(1, len(table) - 1)  # any of them might have won
    differences = _differences(field, uniform, fresh, others)
    for allocation, seeds in dropped.items():
        together = {a: v for a, v in values.items() if set(seeds) <= set(v)}
        found = _differences(together, uniform, seeds[1:], others)
        differences[allocation] = found.get(allocation, _UNKNOWN)
    for row in table:
        row.update(differences.get(Allocation(row["experts"]), _UNKNOWN))
    apart = named_spread(records, spec, confirm_seeds if fresh else 0)
    better = bool(table) and table[0]["high"] is not None and table[0]["high"] < 0
    return {
        "text": _verdict(table, uniform, fresh, spec.objective),
        "winner": table[0]["trial"] if table else None,
        "better": better,
        "confidence": CONFIDENCE,
        "fresh_seeds": list(fresh),
        "spread": None if apart is None else {"signal": apart.signal, "noise": apart.noise},
        "table": table,
    }


def named_spread(
    records: Sequence[TrialRecord], spec: StudySpec, confirm_seeds: int
) -> Spread | None:
    """Measure signal and noise on the named allocations, which no result has chosen.

    Args:
        records: the study's trials.
        spec: what the study is about.
        confirm_seeds: number of fresh seeds, of which those count that everybody runs on.

    Returns:
        None with fewer than two named allocations that finished on all these seeds.
    """
    names = named_allocations(spec.budget)
    seeds = {spec.seed, *fresh_seeds(spec, min(BLOCKS, confirm_seeds))}
    values = measured(records)
    return spread({a: v for a, v in values.items() if a in names and seeds <= set(v)})


_UNKNOWN: dict[str, float | None] = {"difference": None, "low": None, "high": None}


def _dropped(
    values: Values, confirmed: Values, seeds: Sequence[int]
) -> dict[Allocation, tuple[int, ...]]:
    """Find who left the race; return the seeds that each finished on, before the first gap."""
    found = {}
    for allocation, by_seed in values.items():
        run = tuple(itertools.takewhile(by_seed.__contains__, seeds))
        if allocation not in confirmed and len(run) > BLOCKS:  # the study's own seed on top
            found[allocation] = run
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def _differences(
    field: Values, uniform: Allocation, fresh: Sequence[int], comparisons: int
) -> dict[Allocation, dict[str, float | None]]:
    """Compare every allocation with uniform on the fresh seeds; empty where that cannot be."""
    if uniform not in field or not fresh:
        return {}
    on_fresh = {a: {s: by_seed[s] for s in fresh} for a, by_seed in field.items()}
    return {
        c.allocation: {
            "difference": c.difference,
            "low": _finite(c.low),
            "high": _finite(c.high),
        }
        for c in compare(on_fresh, uniform, confidence=CONFIDENCE, comparisons=comparisons)
    }


class _Rows:
    """Sums up the trials of an allocation; the study is looked through once."""

    def __init__(self, records: Sequence[TrialRecord], spec: StudySpec) -> None:
        self._seed = spec.seed
        self._names: dict[Allocation, list[str]] = {
            a: list(names) for a, names in named_allocations(spec.budget).items()
        }
        for allocation, name in _priors(records).items():
            self._names.setdefault(allocation, []).append(name)
        self._trials: dict[Allocation, dict[int, TrialRecord]] = defaultdict(dict)
        for record in records:
            if record.state == "COMPLETE":
                self._trials[record.allocation].setdefault(record.seed, record)

    def row(
        self, allocation: Allocation, seeds: Sequence[int], *, dropped: bool = False
    ) -> dict[str, Any]:
        """Sum up an allocation's trials on the seeds, each of which it finished on."""
        trials = self._trials[allocation]
        objectives = [_measured(trials[seed].objective) for seed in seeds]
        several = len(seeds) > 1
        return {
            "experts": list(allocation.experts),
            "names": self._names.get(allocation, []),
            "trial": trials[self._seed].number,
            "mean": fmean(objectives),
            "standard_error": stdev(objectives) / math.sqrt(len(seeds)) if several else None,
            "seeds": len(seeds),
            "dropped": dropped,
            "accuracy": fmean(_measured(trials[seed].accuracy) for seed in seeds),
        }


def _verdict(
    table: Sequence[Mapping[str, Any]], uniform: Allocation, fresh: Sequence[int], unit: str
) -> str:
    """Say in a sentence what the numbers support, and no more."""
    if not table:
        return "no allocation finished"
    winner = table[0]
    if not fresh:
        return "not compared with uniform: no allocation was run again on fresh seeds"
    if winner["experts"] == list(uniform.experts):
        return f"uniform itself has the best mean of {len(table)} allocations"
    if winner["difference"] is None:
        return "not compared with uniform, which did not finish on all seeds"
    if winner["low"] is None:
        return "not distinguishable from uniform: one fresh seed gives no interval"
    numbers = (
        f"{CONFIDENCE:.0%} interval [{winner['low']:+.4f}, {winner['high']:+.4f}], "
        f"{len(fresh)} fresh seeds"
    )
    if winner["high"] < 0:
        return f"better than uniform by {-winner['difference']:.4f} {unit}, {numbers}"
    return (
        f"not distinguishable from uniform: {winner['difference']:+.4f} {unit} on the fresh "
        f"seeds, {numbers}"
    )


def _measured(value: float | None) -> float:
    """A complete trial has its numbers; the store sees to it."""
    assert value is not None
    return value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
