"""Print what a retrain found: the scores, and the paired differences to the baselines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from mola.allocation import Allocation
from search.full.results import Results, Run, Scores
from studies.stats import compare

CONFIDENCE = 0.95


def print_report(
    console: Console, results: Results, allocations: Mapping[str, Allocation], out: Path
) -> None:
    """Print the results.

    Args:
        console: On stdout.
        results: Of the folder.
        allocations: Those that were asked for, by name; the exported one first.
        out: The folder.
    """

    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    runs = {
        name: [run for run in results.runs if run.experts == allocation.experts]
        for name, allocation in allocations.items()
    }
    has_test = all(run.test is not None for found in runs.values() for run in found)
    for name, allocation in allocations.items():
        say(f"{name}: {allocation} ({allocation.total} experts)")
    say()
    console.print(runs_table(results, runs, has_test))
    unit = results.conditions.objective
    say(f"  objective: {unit}, lower is better; +- standard error over the seeds")
    if not has_test:
        say("  there is no test split: this rests on validation, which the search decided by")
    say()
    for line in differences_to_baselines(runs, unit, has_test):
        say(line)
    say(f"Adapter (seed {results.conditions.seed}): {out}")
    say(f"Numbers: {out / 'results.json'}")


def differences_to_baselines(runs: dict[str, list[Run]], unit: str, has_test: bool) -> list[str]:
    """Say how the first allocation does against each of the others, on common seeds.

    The intervals hold together, and stand for other seeds on the same rows.

    Args:
        runs: Finished fine-tunes by name, the exported allocation first.
        unit: Of the objective.
        has_test: Whether the test split counts, else validation.

    Returns:
        A line per baseline.
    """
    exported, *baselines = runs
    if not baselines:
        return []
    values = {
        Allocation(found[0].experts): {
            run.seed: _decisive(run, has_test).objective for run in found
        }
        for found in runs.values()
    }
    reference = Allocation(runs[exported][0].experts)
    found = {c.allocation: c for c in compare(values, reference, confidence=CONFIDENCE)}
    lines = []
    for name in baselines:
        against = found[Allocation(runs[name][0].experts)]
        line = (
            f"{exported} - {name} on {'test' if has_test else 'validation'}: "
            f"{-against.difference:+.4f} {unit}, "
        )
        if math.isfinite(against.low):
            line += (
                f"{CONFIDENCE:.0%} interval [{-against.high:+.4f}, {-against.low:+.4f}] "
                f"over {against.seeds} seeds"
            )
        else:
            line += "one seed gives no interval (see --seeds)"
        lines.append(line)
    return lines


def pareto(runs: Mapping[str, Sequence[Run]], has_test: bool) -> list[str]:
    """Name the allocations that no other one beats with as few experts, fewest experts first.

    Args:
        runs: Finished fine-tunes by name.
        has_test: Whether the test split counts, else validation.

    Returns:
        Their names; empty where all have the same number of experts.
    """
    points = [
        (sum(found[0].experts), fmean(_decisive(run, has_test).objective for run in found), name)
        for name, found in runs.items()
    ]
    if len({total for total, _, _ in points}) == 1:
        return []
    best, names = math.inf, []
    for _, objective, name in sorted(points):
        if objective < best:
            best = objective
            names.append(name)
    return names


def runs_table(results: Results, runs: Mapping[str, list[Run]], has_test: bool) -> Table:
    """Put the allocations' mean scores side by side."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    splits = ("validation", "test") if has_test else ("validation",)
    for split in splits:
        table.add_column(split, justify="right", no_wrap=True)
        table.add_column("accuracy", justify="right")
    table.add_column("seeds", justify="right")
    rows = {
        name: {split: [getattr(run, split) for run in found] for split in splits}
        for name, found in runs.items()
    }
    if results.frozen:
        rows["no adapter"] = {split: [results.frozen[split]] for split in splits}
    for name, scores in rows.items():
        cells = [cell for split in splits for cell in _cells(scores[split])]
        table.add_row(name, *cells, str(len(runs[name])) if name in runs else "")
    return table


def _cells(scores: Sequence[Scores]) -> list[str]:
    objectives = [s.objective for s in scores]
    text = f"{fmean(objectives):.4f}"
    if len(objectives) > 1:
        text += f" +- {stdev(objectives) / math.sqrt(len(objectives)):.4f}"
    return [text, f"{fmean(s.accuracy for s in scores):.1%}"]


def _decisive(run: Run, has_test: bool) -> Scores:
    if not has_test:
        return run.validation
    assert run.test is not None
    return run.test
