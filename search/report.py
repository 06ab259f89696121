"""Write a study's report, report.html and report.md: `python -m search.report --study NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from search.cli import Command, option, study_options, user_errors

if TYPE_CHECKING:
    import optuna

HTML_FILE, MARKDOWN_FILE = "report.html", "report.md"


def write_report(study: optuna.Study, root: Path, storage: str | None) -> Path:
    """Write both files to the study's folder, whole or not at all.

    Args:
        study: To report on, finished or not.
        root: Folder of the studies.
        storage: URL of the study's storage, if it is not the default one.

    Returns:
        The HTML file.

    Raises:
        ValueError: The study was made by another program or another version.
        OSError: A file cannot be written.
    """
    from mola.allocation import Allocation
    from search.compare_store import find_comparison, runs_of
    from search.findings import read_findings
    from search.marginal import worth_by_layer
    from search.report_full import full_runs
    from search.report_html import html_report
    from search.report_markdown import markdown_report
    from search.report_origin import origin
    from search.report_sections import sections, verdict
    from studies.files import write_text_atomic

    findings = read_findings(study)
    winner = findings.winner
    worths = []
    if winner is not None:
        base = Allocation(winner["experts"])
        worths = worth_by_layer(study, findings.spec.budget, base, findings.resolution or 0.0)
    claims = verdict(findings)
    parts = sections(findings, worths)
    comparison = find_comparison(study)
    if comparison is not None and (runs := runs_of(comparison)):
        parts.insert(1, full_runs(findings, runs))
    parts.append(origin(findings, root, storage))
    folder = root / findings.name
    write_text_atomic(folder / HTML_FILE, html_report(findings.name, claims, parts))
    write_text_atomic(folder / MARKDOWN_FILE, markdown_report(findings.name, claims, parts))
    return folder / HTML_FILE


@click.command(cls=Command)
@option("Report", "--study", required=True, metavar="NAME", help="Name of the study.")
@study_options
def main(study: str, root: Path, storage: str | None) -> None:
    """Write a study's report as one HTML file without outside parts, and as Markdown.

    They say what won and what may be claimed, show how the search went and what it cost, and hold
    everything that is needed to repeat it. They can be written at any time, during a search too.
    """
    with user_errors():
        from studies.store import load_study, storage_url

        path = write_report(load_study(study, storage_url(root, study, storage)), root, storage)
    click.echo(f"wrote {path} and {path.with_suffix('.md').name}")


if __name__ == "__main__":
    main()
