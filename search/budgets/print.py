"""Print what several budgets say together."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from search.budgets.compare import Budgets
from search.budgets.report import COLUMNS, rows, step_rows, verdict

_SHOWN = 5  # columns that fit into 80 characters; the last is in each budget's own results


def print_budgets(console: Console, budgets: Budgets, report: Path | None) -> None:
    """Print a row per budget, a row per step, and what may be claimed.

    Args:
        console: on stdout.
        budgets: finished or not.
        report: the file with the figure; None: not written.
    """

    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say()
    say(f"Budgets of {budgets.name}")
    console.print(_table(COLUMNS[:_SHOWN], [row[:_SHOWN] for row in rows(budgets)]))
    if budgets.steps:
        say()
        console.print(_table(("experts", "winner", "uniform"), step_rows(budgets)))
    which = "fresh seeds" if budgets.fresh else "search's own seed"
    say(
        f"  loss: mean over the {which} {', '.join(map(str, budgets.seeds))} that all budgets "
        f"share, {budgets.unit}, lower is better"
    )
    say()
    for sentence in verdict(budgets):
        say(sentence)
    if report is not None:
        say(f"{'Report:':<11}{report}, {report.with_suffix('.md').name}")


def _table(columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*map(escape, line))
    return table
