"""Sum up a study's trials for figures: progress, seeds, rank agreement, where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

import numpy as np

from mola.allocation import Allocation
from search.full.plan import EPOCHS
from search.report.findings import Findings
from studies.records import REPLICATE, TrialRecord


@dataclass(frozen=True)
class SeedDifferences:
    """An allocation against uniform, seed by seed, in the objective's unit.

    Attributes:
        name: What people call it.
        chosen_by: Difference on the study's own seed, by which the finalists were chosen.
        fresh: Differences on the fresh seeds.
        mean: Their mean.
        low: Lower end of its interval, which holds together with all others; None: unknown.
        high: Upper end; None: unknown.
    """

    name: str
    chosen_by: float | None
    fresh: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class TimeSpent:
    """Where the workers' time went, in seconds of all workers together.

    Attributes:
        training: Training steps of trials that finished.
        evaluation: Evaluations of trials that finished.
        overhead: The rest of these trials: attaching, waiting for decisions, writing.
        cut_short: Trials that were pruned or failed, altogether.
        idle: Workers without a trial while others had one.
        wall: Wall clock with a trial running; breaks between runs do not count.
        workers: Most trials at a time.
    """

    training: float
    evaluation: float
    overhead: float
    cut_short: float
    idle: float
    wall: float
    workers: int


@dataclass(frozen=True)
class Cost:
    """What the search cost, in units of one full fine-tune as `search.retrain` does by default.

    Attributes:
        rows: Rows trained on; of a failed trial only up to its last rung.
        by_rows: The same in full fine-tunes.
        full_seconds: Estimated training time of one, on one worker, at the search's speed.
        by_time: All the workers' time in full fine-tunes.
    """

    rows: int
    by_rows: float
    full_seconds: float
    by_time: float


def best_so_far(trials: Sequence[TrialRecord]) -> list[tuple[int, float]]:
    """Give number and objective of each trial that was better than all before it."""
    points: list[tuple[int, float]] = []
    for trial in trials:
        if trial.objective is not None and (not points or trial.objective < points[-1][1]):
            points.append((trial.number, trial.objective))
    return points


def differences_by_seed(findings: Findings) -> list[SeedDifferences]:
    """Compare the allocations of the conclusion with uniform, seed by seed."""
    values: dict[Allocation, dict[int, float]] = {}
    for trial in findings.trials:
        if trial.state == "COMPLETE" and trial.objective is not None:
            values.setdefault(trial.allocation, {}).setdefault(trial.seed, trial.objective)
    base = values.get(findings.uniform, {})
    own = findings.spec.seed
    rows = []
    for row in findings.conclusion["table"]:
        allocation = Allocation(row["experts"])
        paired = {
            seed: value - base[seed] for seed, value in values[allocation].items() if seed in base
        }
        if allocation == findings.uniform or row["difference"] is None:
            continue
        fresh = tuple(paired[s] for s in findings.conclusion["fresh_seeds"] if s in paired)
        rows.append(
            SeedDifferences(
                findings.called(allocation, row["trial"]),
                paired.get(own),
                fresh,
                row["difference"],
                row["low"],
                row["high"],
            )
        )
    return rows


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Give Spearman's rank correlation, ties at their mean rank; None where it is undefined."""
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    power = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / power if power > 0 else None


def time_spent(trials: Sequence[TrialRecord]) -> TimeSpent | None:
    """Sum up the trials that are over; None if none is."""
    over = [t for t in trials if t.seconds is not None and t.began is not None]
    if not over:
        return None
    done = [t for t in over if t.train_seconds is not None and t.eval_seconds is not None]
    training = sum(t.train_seconds or 0.0 for t in done)
    evaluation = sum(t.eval_seconds or 0.0 for t in done)
    in_done = sum(t.seconds or 0.0 for t in done)
    total = sum(t.seconds or 0.0 for t in over)
    wall, workers = _busy(over)
    return TimeSpent(
        training=training,
        evaluation=evaluation,
        overhead=max(0.0, in_done - training - evaluation),
        cut_short=total - in_done,
        idle=max(0.0, workers * wall - total),
        wall=wall,
        workers=workers,
    )


def cost(findings: Findings) -> Cost | None:
    """Compare the search with one full fine-tune; None where too little is known."""
    spent, train = time_spent(findings.trials), findings.spec.train
    if spent is None or not findings.runs or spent.training == 0:
        return None
    steps = sum(_steps(trial, train.steps) for trial in findings.trials)
    trained = sum(train.steps for t in findings.trials if t.train_seconds is not None)
    full = EPOCHS * findings.runs[-1].train_rows
    full_seconds = spent.training / (trained * train.batch_size) * full
    everything = spent.training + spent.evaluation + spent.overhead + spent.cut_short + spent.idle
    rows = steps * train.batch_size
    return Cost(rows, rows / full, full_seconds, everything / full_seconds)


def measured(findings: Findings) -> int:
    """Count the distinct allocations that were measured, pruned ones included."""
    over = ("COMPLETE", "PRUNED")
    return len({t.allocation for t in findings.trials if t.state in over and t.label != REPLICATE})


def mean_seconds(findings: Findings) -> float | None:
    """Give the mean wall clock of a trial at full length, None before there is one."""
    durations = [t.seconds for t in findings.trials if t.state == "COMPLETE" and t.seconds]
    return sum(durations) / len(durations) if durations else None


def seconds_left(findings: Findings, now: datetime) -> float | None:
    """Estimate the wall clock to the end of a running search; None where it cannot be known.

    Args:
        findings: The study; its latest run says how far it goes.
        now: Local time, as in the store.
    """
    usual = mean_seconds(findings)
    running = [t for t in findings.trials if t.state == "RUNNING" and t.began is not None]
    if usual is None or not running or not findings.runs:
        return None
    replicates = [t for t in findings.trials if t.label == REPLICATE]
    if any(t.allocation not in findings.names for t in replicates):  # the confirmation has begun
        trials = sum(t.state in ("WAITING", "RUNNING") for t in replicates)
    else:
        done = sum(t.state == "COMPLETE" for t in replicates)
        run = findings.runs[-1]
        trials = run.goal - measured(findings) + max(0, run.replicates - done)
    elapsed = [(now - t.began).total_seconds() for t in running if t.began is not None]
    passed = sum(min(seconds, usual) for seconds in elapsed)
    return max(0.0, trials * usual - passed) / len(running)


def _steps(trial: TrialRecord, all_steps: int) -> int:
    """Say how many steps a trial is known to have taken."""
    return all_steps if trial.state == "COMPLETE" else max(trial.rungs, default=0)


def _busy(trials: Sequence[TrialRecord]) -> tuple[float, int]:
    """Give the wall clock with a trial running, and the most that ran at a time."""
    moments = []
    for trial in trials:
        assert trial.began is not None
        assert trial.ended is not None
        moments += [(trial.began, 1), (trial.ended, -1)]
    moments.sort(key=lambda moment: (moment[0], moment[1]))
    running = most = 0
    wall = timedelta()
    for (now, change), (then, _) in pairwise(moments):
        running += change
        most = max(most, running)
        wall += then - now if running else timedelta()
    return wall.total_seconds(), most


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    below = (array[:, None] > array).sum(axis=1)
    equal = (array[:, None] == array).sum(axis=1)
    ranks: np.ndarray = below + (equal - 1) / 2
    return ranks
