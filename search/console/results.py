"""Print what a search found, and what can be done with it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mola.allocation import Allocation
from search.console.bars import chart
from search.console.command_line import module_command, study_place
from search.plan import Settings
from studies.spec import StudySpec
from studies.storage import mask


def print_results(
    console: Console, conclusion: Mapping[str, Any], settings: Settings, spec: StudySpec, url: str
) -> None:
    """Print the winner, the comparison, the files and the commands to go on with.

    Args:
        console: on stdout.
        conclusion: see `search.conclude`.
        settings: in force, with the study's name.
        spec: what the study is about.
        url: of the storage.
    """
    winner = conclusion["table"][0]
    allocation = Allocation(winner["experts"])

    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"Winner: trial {winner['trial']}{_called(winner)}")
    say(f"  {allocation}")
    say(f"  {conclusion['text']}")
    say()
    say(chart(allocation, console.encoding))
    say()
    console.print(comparison(conclusion))
    for line in footnotes(conclusion, spec):
        say(f"  {line}")
    say()
    for name, text in commands(settings, url).items():
        say(f"{name + ':':<11}{text}")


def footnotes(conclusion: Mapping[str, Any], spec: StudySpec) -> list[str]:
    """Say what the comparison's columns are, and how much noise there is."""
    winner = conclusion["table"][0]
    seeds = "one seed"
    if winner["seeds"] > 1:
        seeds = f"{winner['seeds']} seeds, one of which chose the finalists, +- standard error"
    lines = [f"objective: validation loss in {spec.objective}, lower is better; mean of {seeds}"]
    if conclusion["fresh_seeds"]:
        fresh = ", ".join(map(str, conclusion["fresh_seeds"]))
        lines.append(
            f"to uniform: paired difference on the fresh seeds {fresh}, with intervals that "
            f"hold together at {conclusion['confidence']:.0%} (residual pooled over all rows)"
        )
    if any(row["dropped"] for row in conclusion["table"]):
        lines.append("out: clearly behind after some of these seeds, and not run on the rest")
    spread = conclusion["spread"]
    if spread is not None:
        lines.append(
            f"signal to noise: the named allocations differ by {spread['signal']:.4f} (standard "
            f"deviation), the noise of one proxy is {spread['noise']:.4f}"
        )
        if spread["signal"] < spread["noise"]:
            lines.append("much noise: raise --steps, --validation-rows or --confirm-seeds")
    return lines


def commands(settings: Settings, url: str) -> dict[str, str]:
    """Give where the files are, and the commands that use them."""
    folder = study_folder(settings)
    name = str(settings.study)
    where = study_place(settings.root, settings.storage)
    exported = folder / "allocation.json"
    data = [] if settings.data is None else ["--data", settings.data]
    return {
        "Files": f"{exported}, report.html, report.md, trials.csv, config.toml"
        + (", study.db" if _is_here(url) else ""),
        "Dashboard": shlex.join(["optuna-dashboard", mask(url)]),
        "Export": module_command("export", "--study", name, *where, "--out", "winner.json"),
        "Compare": module_command("compare", "--study", name, *where, *data, "--with", "5555"),
        "Retrain": module_command(
            "retrain", "--allocation", str(exported), *data, "--out", str(folder / "adapter")
        ),
        "Go on": f"{module_command('run', '--config', str(folder / 'config.toml'))} "
        f"--trials {2 * settings.trials}",
    }


def study_folder(settings: Settings) -> Path:
    """Give the folder of the study's files."""
    return settings.root / str(settings.study)


def continue_command(settings: Settings) -> str:
    """Give the command that goes on with the study."""
    return module_command("run", "--config", str(study_folder(settings) / "config.toml"))


def comparison(conclusion: Mapping[str, Any]) -> Table:
    """Put the winner, the named allocations and the other finalists side by side."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=True)
    table.add_column("")
    for heading in ("allocation", "objective", "accuracy", "to uniform", "interval"):
        left = heading == "allocation"
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    confirmed = bool(conclusion["fresh_seeds"])
    for place, row in enumerate(conclusion["table"]):
        if not (confirmed or row["names"] or place == 0):
            continue
        error = row["standard_error"]
        is_reference = "5555" in row["names"]
        known = row["difference"] is not None and not is_reference
        bounded = known and row["low"] is not None
        table.add_row(
            "*" if place == 0 else "out" if row["dropped"] else "",
            "uniform"
            if is_reference
            else escape(",".join(row["names"])) or f"trial {row['trial']}",
            f"{row['mean']:.4f}" + (f" +- {error:.4f}" if error is not None else ""),
            f"{row['accuracy']:.1%}",
            f"{row['difference']:+.4f}" if known else "",
            f"[{row['low']:+.4f}, {row['high']:+.4f}]" if bounded else "",
        )
    return table


def _called(row: Mapping[str, Any]) -> str:
    return f" ({', '.join(row['names'])})" if row["names"] else ""


def _is_here(url: str) -> bool:
    return url.startswith("sqlite:")
