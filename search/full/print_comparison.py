"""Print a comparison of full fine-tunes: scores, paired differences, and the Pareto line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from mola.allocation import Allocation
from search.full.print_runs import differences_to_baselines, pareto, runs_table
from search.full.results import FORMAT_VERSION, Conditions, Results, Run


def print_comparison(
    console: Console,
    conditions: Conditions,
    allocations: Mapping[str, Allocation],
    runs: Sequence[Run],
) -> None:
    """Print the results.

    Args:
        console: On stdout.
        conditions: Common to all runs.
        allocations: By name; the first one is compared with the others.
        runs: Finished fine-tunes, of each allocation on the same seeds.
    """

    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    by_name = {
        name: [run for run in runs if run.experts == allocation.experts]
        for name, allocation in allocations.items()
    }
    has_test = all(run.test is not None for run in runs)
    for name, allocation in allocations.items():
        say(f"{name}: {allocation} ({allocation.total} experts)")
    say()
    results = Results(FORMAT_VERSION, conditions, {}, tuple(runs))
    console.print(runs_table(results, by_name, has_test))
    unit = conditions.objective
    say(f"  objective: {unit}, lower is better; +- standard error over the seeds")
    say("  differences are paired by seed; the intervals of a split hold together (Bonferroni)")
    say()
    for on_test in (False, True) if has_test else (False,):
        for line in differences_to_baselines(by_name, unit, on_test):
            say(line)
    if not has_test:
        say("There is no test split: this rests on validation, which the search decided by.")
    front = pareto(by_name, has_test)
    if front:
        totals = ", ".join(f"{name} ({allocations[name].total} experts)" for name in front)
        say(f"Pareto line of experts and {'test' if has_test else 'validation'} loss: {totals}")
