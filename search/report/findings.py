"""Derive from a study what its report, its dashboard and its status show; plain data, no drawing.

Everything is read from the store, so that it can be asked for at any time and from any process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optuna

from mola.allocation import Allocation
from search.conclude import conclude
from search.priors.named import named, named_allocations
from studies.provenance import RunNote, run_notes
from studies.records import (
    REPLICATE,
    TrialRecord,
    get_conclusion,
    records,
    study_spec,
)
from studies.spec import StudySpec

MOST_BEST = 5  # rows of a comparison that are shown where nothing is confirmed


@dataclass(frozen=True)
class Findings:
    """A study as it stands.

    Attributes:
        name: Of the study.
        spec: What is searched.
        trials: All trials, by number.
        conclusion: See `search.conclude`; of the trials so far while the search goes on.
        finished: Whether nothing waits or runs and the search has concluded.
        runs: The runs of the command.
    """

    name: str
    spec: StudySpec
    trials: tuple[TrialRecord, ...]
    conclusion: dict[str, Any]
    finished: bool
    runs: tuple[RunNote, ...]

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of trials by state."""
        return Counter(trial.state for trial in self.trials)

    @cached_property
    def names(self) -> dict[Allocation, str]:
        """What people call the named allocations; the first is uniform."""
        found = named_allocations(self.spec.budget)
        return {allocation: ",".join(names) for allocation, names in found.items()}

    @cached_property
    def uniform(self) -> Allocation:
        """The allocation to beat."""
        return named("5555", self.spec.budget)

    @cached_property
    def complete(self) -> list[TrialRecord]:
        """Trials at full length on the study's own seed, those that compete with one another."""
        return [t for t in self.trials if t.state == "COMPLETE" and t.label != REPLICATE]

    @cached_property
    def best(self) -> TrialRecord | None:
        """The lowest objective on the study's own seed."""
        return min(self.complete, key=lambda t: (_value(t), t.number), default=None)

    @cached_property
    def uniform_objective(self) -> float | None:
        """Uniform's objective on the study's own seed."""
        return next((_value(t) for t in self.complete if t.allocation == self.uniform), None)

    @property
    def winner(self) -> dict[str, Any] | None:
        """The winner's row of the conclusion's table."""
        return self.conclusion["table"][0] if self.conclusion["table"] else None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The conclusion's table; without fresh seeds only its best rows and the named ones."""
        table: list[dict[str, Any]] = self.conclusion["table"]
        if self.conclusion["fresh_seeds"]:
            return table
        return [row for place, row in enumerate(table) if place < MOST_BEST or row["names"]]

    @property
    def first(self) -> str:
        """What the first row of the table is called."""
        return "winner" if self.finished else "best so far"

    @property
    def resolution(self) -> float | None:
        """Half the width of the intervals: the smallest difference that can be told.

        Those who dropped out of the race have wider ones, on fewer seeds.
        """
        rows = [row for row in self.conclusion["table"] if not row.get("dropped")]
        bounded = [row for row in rows if row["low"] is not None]
        halves = [(row["high"] - row["low"]) / 2 for row in bounded]
        return max(halves, default=None)

    def called(self, allocation: Allocation, trial: int) -> str:
        """Give an allocation's name for people."""
        if allocation == self.uniform:
            return "uniform"
        return self.names.get(allocation, f"trial {trial}")


def read_findings(study: optuna.Study) -> Findings:
    """Read a study.

    Raises:
        ValueError: It was made by another program or another version.
    """
    spec, trials = study_spec(study), records(study)
    stored = get_conclusion(study)
    open_ = any(t.state in ("WAITING", "RUNNING") for t in trials)
    if stored is not None and not open_:
        conclusion = stored
    else:
        conclusion = conclude(trials, spec, confirm_seeds=_confirmed_seeds(trials, spec))
    return Findings(
        study.study_name,
        spec,
        tuple(trials),
        conclusion,
        conclusion is stored,
        tuple(run_notes(study)),
    )


def _confirmed_seeds(trials: Sequence[TrialRecord], spec: StudySpec) -> int:
    """Count the fresh seeds on which uniform and a finalist are measured.

    The named allocations are measured on some from the beginning, and none of them has won for
    that; and one seed alone gives no interval.
    """
    names, uniform = named_allocations(spec.budget), named("5555", spec.budget)
    done = [t for t in trials if t.state == "COMPLETE"]
    seeds = {t.seed for t in done if t.allocation == uniform}
    seeds &= {t.seed for t in done if t.allocation not in names}
    count = 0
    while spec.seed + count + 1 in seeds:
        count += 1
    return count if count > 1 else 0


def _value(trial: TrialRecord) -> float:
    """A complete trial has an objective; the store sees to it."""
    assert trial.objective is not None
    return trial.objective
