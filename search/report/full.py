"""Say in the report what full fine-tunes found, and whether the short runs foretold their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from mola.allocation import Allocation
from search.full.results import Run, Scores
from search.report import figures
from search.report.findings import Findings
from search.report.measures import rank_correlation
from search.report.parts import Section, Table


def full_runs(findings: Findings, runs: Sequence[Run]) -> Section:
    """Give the section of the full fine-tunes that `search.compare` has recorded.

    Args:
        findings: Of the search.
        runs: Finished full fine-tunes.
    """
    by_allocation: dict[Allocation, list[Run]] = {}
    for run in runs:
        by_allocation.setdefault(Allocation(run.experts), []).append(run)
    ranked = sorted(
        by_allocation.items(), key=lambda item: fmean(r.validation.objective for r in item[1])
    )
    rows = tuple(
        (
            found[-1].name,
            str(allocation.total),
            *_scores([run.validation for run in found]),
            *_scores([run.test for run in found if run.test is not None]),
            str(len(found)),
        )
        for allocation, found in ranked
    )
    columns = ("allocation", "experts", "validation", "accuracy", "test", "accuracy", "seeds")
    unit = findings.spec.objective
    text = [
        f"Loss in {unit} at full length, mean ± standard error over the seeds. What may be "
        "claimed of the differences, search.compare says: it pairs the runs by seed."
    ]
    known = [
        (found[-1].name, fmean(values), found)
        for allocation, found in ranked
        if (values := _measured(findings, allocation))
    ]
    x = [value for _, value, _ in known]
    y = [fmean(run.validation.objective for run in found) for _, _, found in known]
    agreement = rank_correlation(x, y) if len(known) > 2 else None
    if agreement is not None:
        text.append(
            f"The order of the short runs against that of the full ones: rank correlation "
            f"{agreement:+.2f} over {len(known)} allocations."
        )
    labels = (f"loss of the short runs, {unit}", f"loss at full length, {unit}")
    drawn = figures.order([name for name, _, _ in known], x, y, labels)
    caption = "Short and full runs of the same allocations, each the mean over its seeds."
    return Section(
        "Full fine-tunes",
        tuple(text),
        ((drawn, caption),) if drawn else (),
        (Table(columns, rows),),
    )


def _measured(findings: Findings, allocation: Allocation) -> list[float]:
    """Give the objectives of an allocation's short runs at full length."""
    return [
        t.objective
        for t in findings.trials
        if t.state == "COMPLETE" and t.allocation == allocation and t.objective is not None
    ]


def _scores(scores: Sequence[Scores]) -> tuple[str, str]:
    if not scores:
        return "", ""
    objectives = [s.objective for s in scores]
    text = f"{fmean(objectives):.4f}"
    if len(objectives) > 1:
        text += f" ± {stdev(objectives) / math.sqrt(len(objectives)):.4f}"
    return text, f"{fmean(s.accuracy for s in scores):.1%}"
