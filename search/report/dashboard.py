"""Keep the Optuna dashboard's note and plots of a study up to date while a search runs.

They are written by the driver's process, like everything in the study, and rarely enough to cost
no more than a twentieth of its time.
"""

from __future__ import annotations

import time

import optuna
from optuna_dashboard import save_note, save_plotly_graph_object

from mola.allocation import Allocation
from search.report.findings import read_findings
from search.report.marginal import worth_by_layer
from search.report.plots import all_plots
from search.report.sections import verdict
from search.updates import Ended, Phase, Update
from studies import store
from studies.note import study_note

PAUSE_SECONDS = 30.0
_SHARE = 20  # a refresh waits so many times as long as the last one took


class Dashboard:
    """A listener of the driver.

    Args:
        study: Whose note and plots are written.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self._due = 0.0

    def apply(self, update: Update) -> None:
        """Refresh when a phase begins, and now and then when a trial has ended."""
        ended = isinstance(update, Ended) and time.monotonic() >= self._due
        if isinstance(update, Phase) or ended:
            began = time.monotonic()
            refresh(self._study)
            now = time.monotonic()
            self._due = now + max(PAUSE_SECONDS, _SHARE * (now - began))


def refresh(study: optuna.Study) -> None:
    """Write the note and the plots as the study stands."""
    findings = read_findings(study)
    worths = []
    if findings.winner is not None:
        base = Allocation(findings.winner["experts"])
        worths = worth_by_layer(study, findings.spec.budget, base, findings.resolution or 0.0)
    versions = findings.runs[-1].versions if findings.runs else {}
    save_note(study, study_note(findings.spec, verdict(findings), versions))
    for name, plot in all_plots(findings, worths).items():
        with store.at_once(study):
            save_plotly_graph_object(study, plot, graph_object_id=name)
