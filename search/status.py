"""Say how a search stands, from another shell: `python -m search.status --study NAME`.

Reads the store alone, and loads neither torch nor Ray.
"""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from search.console.cli import (
    Command,
    one_line,
    option,
    printable,
    study_options,
    user_errors,
)

if TYPE_CHECKING:
    import optuna

    from search.report.findings import Findings

# A search is doubted when no trial has begun for so many mean durations of one, and so long.
SILENT, SILENT_SECONDS = 5, 60


@click.command(cls=Command)
@option(
    "Status",
    "--study",
    metavar="NAME",
    help="Name of the study, or of several budgets.  [default: list all studies]",
)
@study_options
def main(study: str | None, root: Path, storage: str | None) -> None:
    """Show how a search stands, or list all studies, while they run or afterwards."""
    with user_errors():
        from search.budgets.members import find_members
        from search.report.findings import read_findings
        from studies.catalog import find_studies
        from studies.store import load_study, storage_url

        now = datetime.now()
        if study is not None:
            if members := find_members(study, root, storage):
                click.echo(_describe_budgets(study, members, now))
                return
            loaded = load_study(study, storage_url(root, study, storage))
            click.echo(printable(describe(read_findings(loaded), now)))
            return
        found, broken = find_studies(root, storage)
        click.echo(printable(_listing([load_study(name, url) for name, url in found], now)))
        for line in broken:
            click.echo(f"Warning: {printable(line)}", err=True)


def describe(findings: Findings, now: datetime) -> str:
    """Write a study's status in a few lines.

    Args:
        findings: Of the study.
        now: Local time, as in the store.
    """
    from search.console.bars import spark
    from search.console.display import duration
    from search.report.measures import seconds_left

    spec, best = findings.spec, findings.best
    lines = [
        f"{findings.name}: {state(findings, now)}",
        f"  {spec.total} experts over {spec.num_layers} layers, {spec.model_name}, {spec.data}",
        f"  trials: {counts(findings)}" + _of_goal(findings),
    ]
    if best is not None and best.objective is not None:
        drawn = spark(best.allocation, max(spec.budget.highs), sys.stdout.encoding or "ascii")
        lines += [
            f"  best on the search's seed: {best.objective:.4f} {spec.objective}, "
            f"{findings.called(best.allocation, best.number)}{_to_uniform(findings)}",
            f"    {drawn}  {best.allocation}",
        ]
    left = seconds_left(findings, now)
    if left is not None:
        lines.append(f"  time left: about {duration(left)}")
    for trial in findings.trials:
        if trial.state == "RUNNING" and trial.began is not None:
            rungs = ", ".join(f"{v:.4f} after step {s}" for s, v in sorted(trial.rungs.items()))
            since = duration((now - trial.began).total_seconds())
            lines.append(
                f"  running: trial {trial.number}, seed {trial.seed}, for {since}"
                + (f", {rungs}" if rungs else "")
            )
    if findings.winner is not None and findings.conclusion["fresh_seeds"]:
        so_far = "" if findings.finished else "so far: "
        winner = findings.winner["trial"]
        lines.append(f"  {so_far}trial {winner} wins; {findings.conclusion['text']}")
    return "\n".join(lines)


def _describe_budgets(name: str, members: list[optuna.Study], now: datetime) -> str:
    """Write the status of each budget of a search, and what they say together."""
    from search.budgets.compare import read_budgets
    from search.budgets.report import verdict

    budgets = read_budgets(name, members)
    each = [describe(member.findings, now) for member in budgets.members]
    return "\n".join(
        [*each, f"{name}, its budgets together:", *(f"  {s}" for s in verdict(budgets))]
    )


def state(findings: Findings, now: datetime) -> str:
    """Say in a word or a line whether the search runs."""
    if findings.finished:
        return "finished"
    running = [t for t in findings.trials if t.state == "RUNNING" and t.began is not None]
    if not running:
        return "not running" if findings.trials else "nothing has run yet"
    from search.report.measures import mean_seconds

    usual = mean_seconds(findings)
    latest = max(t.began for t in running if t.began is not None)
    if usual is not None and (now - latest).total_seconds() > max(SILENT * usual, SILENT_SECONDS):
        return f"running, or killed: nothing began since {latest:%Y-%m-%d %H:%M}"
    return "running"


def counts(findings: Findings) -> str:
    """Count the trials by state."""
    found = findings.counts
    return (
        f"{found['COMPLETE']} done, {found['RUNNING']} running, {found['PRUNED']} pruned, "
        f"{found['FAIL']} failed, {found['WAITING']} waiting"
    )


def _listing(studies: list[optuna.Study], now: datetime) -> str:
    """Write a line per study."""
    from search.full.store import CONDITIONS_ATTR, runs_of
    from search.report.findings import read_findings
    from studies.records import SPEC_ATTR

    if not studies:
        return "no studies"
    lines = []
    for study in studies:
        if SPEC_ATTR not in study.user_attrs and CONDITIONS_ATTR not in study.user_attrs:
            lines.append(f"{study.study_name}: not made by mola-search")
            continue
        try:
            if CONDITIONS_ATTR in study.user_attrs:
                done = len(runs_of(study))
                lines.append(f"{study.study_name}: {done} full fine-tunes are done")
                continue
            findings = read_findings(study)
        except ValueError as error:
            lines.append(f"{study.study_name}: cannot be read: {one_line(error)}")
            continue
        best = findings.best
        known = "" if best is None else f"; best {best.objective:.4f}{_to_uniform(findings)}"
        lines.append(f"{findings.name}: {state(findings, now)}; {counts(findings)}{known}")
    return "\n".join(lines)


def _of_goal(findings: Findings) -> str:
    from search.report.measures import measured

    if not findings.runs:
        return ""
    return f"; {measured(findings)} of {findings.runs[-1].goal} allocations measured"


def _to_uniform(findings: Findings) -> str:
    known, best = findings.uniform_objective, findings.best
    if known is None or best is None or best.objective is None:
        return ""
    if best.allocation == findings.uniform:
        return ""
    return f", uniform {known:.4f} ({best.objective - known:+.4f})"


if __name__ == "__main__":
    main()
