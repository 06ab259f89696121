"""Write a study's report: report.html and report.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
    from search.full.store import find_comparison, runs_of
    from search.priors.transfer import recorded
    from search.report.findings import read_findings
    from search.report.full import full_runs
    from search.report.html import html_report
    from search.report.marginal import worth_by_layer
    from search.report.markdown import markdown_report
    from search.report.origin import origin
    from search.report.sections import sections, verdict
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
    parts.append(origin(findings, root, storage, recorded(study)))
    folder = root / findings.name
    write_text_atomic(folder / HTML_FILE, html_report(findings.name, claims, parts))
    write_text_atomic(folder / MARKDOWN_FILE, markdown_report(findings.name, claims, parts))
    return folder / HTML_FILE
