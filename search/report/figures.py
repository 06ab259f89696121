"""Draw the report's figures of trials: progress, seeds, accuracy, curves, time.

Each takes what it shows and gives an SVG, or "" with nothing to show. Every axis says its quantity
and its unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from search.report.drawing import BAD, INK, MUTED, OTHER, UNIFORM, WINNER, sheet, whole_numbers
from search.report.findings import Findings
from search.report.measures import SeedDifferences, best_so_far, differences_by_seed, time_spent
from studies.records import REPLICATE, TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CURVES = 400
"""Learning curves in a figure; more are a blot, and take long to draw."""


def progress(findings: Findings) -> str:
    """Draw the objective of each trial of the search, pruned ones marked, and the best so far."""
    own = [t for t in findings.trials if t.label != REPLICATE and t.objective is not None]
    done = [t for t in own if t.state == "COMPLETE"]
    if not done:
        return ""
    with sheet("progress", 3.0) as page:
        (axes,) = page.axes
        axes.plot(*_points(done), "o", color=OTHER, ms=4, label="complete")
        pruned = [t for t in own if t.state == "PRUNED"]
        if pruned:
            label = "pruned, at its last rung"
            edge = _upper_edge([_value(t) for t in done])
            numbers, values = _points(pruned)
            cut = [min(value, edge) for value in values]
            axes.plot(numbers, cut, "x", color=BAD, ms=5, label=label)
        best = best_so_far(done)
        last = max(t.number for t in own)
        steps = [*best, (last, best[-1][1])]
        axes.step(*zip(*steps, strict=True), where="post", color=WINNER, label="best so far")
        _baselines(axes, findings, done)
        axes.set_xlabel("trial number")
        axes.set_ylabel(f"validation loss, {findings.spec.objective}")
        whole_numbers(axes, x=True)
        page.figure.legend(loc="outside upper left", ncols=3)
    return page.svg


def seeds(findings: Findings) -> str:
    """Draw each allocation's differences to uniform on every seed, with simultaneous intervals."""
    rows = differences_by_seed(findings)
    if not rows:
        return ""
    with sheet("seeds", 1.0 + 0.33 * len(rows)) as page:
        (axes,) = page.axes
        axes.axvline(0, color=UNIFORM, lw=1)
        for place, row in enumerate(rows):
            colour = WINNER if place == 0 else INK
            if row.low is not None and row.high is not None:
                axes.plot((row.low, row.high), (place, place), color=colour, lw=2, zorder=2)
            axes.plot([row.mean], [place], "|", color=colour, ms=12, mew=2)
            at = [place] * len(row.fresh)
            fresh = axes.plot(row.fresh, at, "o", color=OTHER, ms=4, zorder=3)
            own = axes.plot(_own_seed(row), place, "o", color=MUTED, mfc="none", ms=5)
            if place == 0:
                handles = {"fresh seed": fresh[0], "the search's own seed": own[0]}
                page.figure.legend(
                    handles.values(), handles.keys(), loc="outside upper left", ncols=2
                )
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(
            f"difference to uniform on the same seed, {findings.spec.objective} (left is better)"
        )
    return page.svg


def accuracy(findings: Findings) -> str:
    """Draw the objective against the accuracy."""
    done = [t for t in findings.complete if t.accuracy is not None]
    if len(done) < 2:
        return ""
    with sheet("accuracy", 3.0) as page:
        (axes,) = page.axes
        axes.plot(
            [_value(t) for t in done],
            [100 * (t.accuracy or 0) for t in done],
            "o",
            color=OTHER,
            ms=4,
        )
        for trial in _marked(findings, done):
            name = findings.called(trial.allocation, trial.number)
            place = (_value(trial), 100 * (trial.accuracy or 0))
            colour = UNIFORM if name == "uniform" else WINNER if trial == findings.best else MUTED
            axes.plot(*place, "o", color=colour, ms=5)
            axes.annotate(name, place, (4, 4), textcoords="offset points", color=colour)
        axes.set_xlabel(f"validation loss, {findings.spec.objective} (left is better)")
        axes.set_ylabel("validation accuracy, %")
    return page.svg


def curves(findings: Findings) -> str:
    """Draw the objective by step, through the rungs to the end."""
    own = _some([t for t in findings.trials if t.label != REPLICATE and t.rungs], findings)
    if not own:
        return ""
    full = [t for t in own if t.state == "COMPLETE"]
    edge = _upper_edge([v for t in full or own for v in t.rungs.values()])
    with sheet("curves", 3.0) as page:
        (axes,) = page.axes
        for trial in own:
            points = [(step, min(value, edge)) for step, value in sorted(trial.rungs.items())]
            if trial.state == "COMPLETE":
                points.append((findings.spec.train.steps, _value(trial)))
            ends_early = trial.state != "COMPLETE"
            colour, width = (BAD, 0.9) if ends_early else (MUTED, 0.7)
            if trial.allocation == findings.uniform:
                colour, width = UNIFORM, 1.8
            elif trial == findings.best:
                colour, width = WINNER, 1.8
            style = "--x" if ends_early else "-"
            axes.plot(*zip(*points, strict=True), style, color=colour, lw=width, ms=4)
            if width > 1:
                name = findings.called(trial.allocation, trial.number)
                axes.annotate(name, points[-1], (4, -3), textcoords="offset points", color=colour)
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel(f"validation loss, {findings.spec.objective}")
        axes.margins(x=0.12)
        axes.set_xticks([*findings.spec.rungs, findings.spec.train.steps])
    return page.svg


def order(
    names: Sequence[str], short: Sequence[float], long: Sequence[float], labels: tuple[str, str]
) -> str:
    """Draw the objective of short runs against that of longer ones of the same allocations.

    Args:
        names: Of the allocations; "" is not written.
        short: Objectives of the short runs.
        long: Of the longer ones.
        labels: Of the axes, with units.
    """
    if len(short) < 2:
        return ""
    with sheet("order-" + "".join(c for c in labels[1] if c.isalnum()), 3.0) as page:
        (axes,) = page.axes
        axes.plot(short, long, "o", color=OTHER, ms=4)
        for name, x, y in zip(names, short, long, strict=True):
            if not name:
                continue
            axes.annotate(name, (x, y), (4, 4), textcoords="offset points", color=MUTED)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
    return page.svg


def time(findings: Findings) -> str:
    """Draw where the workers' time went."""
    spent = time_spent(findings.trials)
    if spent is None:
        return ""
    parts = (
        ("training", spent.training, WINNER),
        ("evaluation", spent.evaluation, OTHER),
        ("waiting and set-up within trials", spent.overhead, UNIFORM),
        ("pruned or failed trials", spent.cut_short, BAD),
        ("workers without a trial", spent.idle, MUTED),
    )
    scale, unit = (3600.0, "hours") if sum(p[1] for p in parts) > 7200 else (60.0, "minutes")
    with sheet("time", 1.5) as page:
        (axes,) = page.axes
        left = 0.0
        for name, seconds, colour in parts:
            width = seconds / scale
            if seconds > 0:
                axes.barh(0, width, 0.6, left, color=colour, label=f"{name}: {width:.1f}")
            left += width
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        workers = f"all {spent.workers} workers together"
        axes.set_xlabel(f"{unit} of {workers if spent.workers > 1 else 'the one worker'}")
        page.figure.legend(loc="outside upper left", ncols=3)
    return page.svg


def _upper_edge(values: Sequence[float]) -> float:
    """Say up to where an axis goes, so that what was pruned does not flatten what was not."""
    low, high = min(values), max(values)
    return high + 0.5 * (high - low or abs(high))


def _own_seed(row: SeedDifferences) -> float:
    return math.nan if row.chosen_by is None else row.chosen_by


def _some(trials: list[TrialRecord], findings: Findings) -> list[TrialRecord]:
    """Keep the best, the named ones and, evenly, so many of the others as a figure has room for."""
    if len(trials) <= MOST_CURVES:
        return trials
    step = math.ceil(len(trials) / MOST_CURVES)
    marked = {trial.number for trial in _marked(findings, trials)}
    return [t for place, t in enumerate(trials) if place % step == 0 or t.number in marked]


def _marked(findings: Findings, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [t for t in trials if t.allocation in findings.names or t == findings.best]


def _points(trials: Sequence[TrialRecord]) -> tuple[list[int], list[float]]:
    return [t.number for t in trials], [_value(t) for t in trials]


def _baselines(axes: Axes, findings: Findings, trials: Sequence[TrialRecord]) -> None:
    """Draw the named allocations' objectives across the axes, names at the right, spread out."""
    known = sorted((_value(t), t.number, t) for t in trials if t.allocation in findings.names)
    low, high = axes.get_ylim()
    at = -math.inf
    for value, _, trial in known:
        name = findings.called(trial.allocation, trial.number)
        colour = UNIFORM if name == "uniform" else MUTED
        axes.axhline(value, color=colour, lw=0.9, ls=":")
        at = max(value, at + 0.065 * (high - low))
        axes.annotate(
            name,
            (1, at),
            (4, -3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=colour,
        )
    axes.set_ylim(low, high)


def _value(trial: TrialRecord) -> float:
    assert trial.objective is not None
    return trial.objective
