"""Write a study's report on demand: `python -m search.report --study NAME`."""

from __future__ import annotations

from pathlib import Path

import click

from search.console.cli import Command, option, study_options, user_errors


@click.command(cls=Command)
@option(
    "Report",
    "--study",
    required=True,
    metavar="NAME",
    help="Name of the study, or of several budgets.",
)
@study_options
def main(study: str, root: Path, storage: str | None) -> None:
    """Write a study's report as one HTML file without outside parts, and as Markdown.

    They say what won and what may be claimed, show how the search went and what it cost, and hold
    everything that is needed to repeat it. They can be written at any time, during a search too.
    """
    with user_errors():
        from search.budgets.members import find_members
        from search.report.write import write_report
        from studies.store import load_study, storage_url

        if members := find_members(study, root, storage):
            from search.budgets.compare import read_budgets
            from search.budgets.report import write_budgets_report

            path = write_budgets_report(read_budgets(study, members), root, storage)
            click.echo(f"wrote {path} and {path.with_suffix('.md').name}")
            return
        path = write_report(load_study(study, storage_url(root, study, storage)), root, storage)
    click.echo(f"wrote {path} and {path.with_suffix('.md').name}")


if __name__ == "__main__":
    main()
