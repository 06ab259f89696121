"""What the Optuna dashboard shows of a study, asked of a real dashboard, and a real browser."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import plotly.graph_objects as go
import pytest
from optuna_dashboard import get_note
from pretend_study import SPEC, empty_study, run_one, searched_study

from mola.allocation import Allocation
from search.priors.named import named
from search.report import dashboard
from search.report.dashboard import Dashboard, refresh
from search.report.findings import read_findings
from search.report.marginal import worth_by_layer
from search.report.plots import Plot, all_plots
from search.updates import Ended, Phase
from search.workers.pool import Job

PLOTS = {"allocations-by-rank", "best-so-far", "loss-against-training-time", "worth-by-depth"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)

# Serves on a free port, which it prints, until its input ends.
SERVER = """
import sys, threading
from wsgiref.simple_server import WSGIRequestHandler, make_server
from optuna_dashboard import wsgi
class Silent(WSGIRequestHandler):
    def log_message(self, *args): pass
server = make_server("127.0.0.1", 0, wsgi(sys.argv[1]), handler_class=Silent)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
"""


@contextmanager
def served(url: str) -> Iterator[str]:
    """Run a dashboard in a process of its own and give its address."""
    words = [sys.executable, "-c", SERVER, url]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The storage of a study whose search is over and whose dashboard is up to date."""
    url = f"sqlite:///{tmp_path_factory.mktemp('dashboard')}/study.db"
    refresh(searched_study(storage=url, confirm_seeds=0))
    return url


def plots() -> dict[str, Plot]:
    study = searched_study()
    findings = read_findings(study)
    assert findings.winner is not None
    base = Allocation(findings.winner["experts"])
    return all_plots(findings, worth_by_layer(study, SPEC.budget, base, 0.01))


def test_the_dashboard_serves_note_plots_and_parameters_in_order(url: str) -> None:
    with served(url) as address:
        study = get(f"{address}/api/studies/1")
    assert study["name"] == "mine"
    assert "lowest mean validation loss" in study["note"]["body"]
    assert "**versions**: python" in study["note"]["body"]
    assert {plot["id"] for plot in study["plotly_graph_objects"]} == PLOTS
    for plot in study["plotly_graph_objects"]:
        assert json.loads(plot["graph_object"])["data"]
    names = [parameter["name"] for parameter in study["union_search_space"]]
    assert sorted(names) == [f"experts_{layer:02d}" for layer in range(6)]
    assert "named 5555" in study["trials"][0]["note"]["body"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_note_and_plots(url: str, tmp_path: Path) -> None:
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/b"]
    options += ["--virtual-time-budget=60000", "--timeout=90000", "--dump-dom"]

    def page(address: str) -> str:
        words = [BROWSER, *options, address]
        return subprocess.run(words, capture_output=True, text=True, timeout=110).stdout

    with served(url) as address:
        note = page(f"{address}/dashboard/studies/1/note")
        drawn = page(f"{address}/dashboard/studies/1")
    assert "<strong>budget</strong>: 18 experts over 6 layers" in note
    assert "rows&lt;script&gt;alert(1)&lt;/script&gt;" in note
    for title in ("Allocations, the best at the top", "Best so far", "One more expert, by depth"):
        assert title in drawn


def test_plotly_knows_every_property_of_the_plots() -> None:
    made = plots()
    assert set(made) == PLOTS
    for plot in made.values():
        document = json.loads(plot.to_json())
        figure = go.Figure(document)  # refuses what it does not know
        assert json.loads(figure.to_json())["data"][0]["type"] == document["data"][0]["type"]


def test_every_axis_of_the_plots_is_named() -> None:
    for name, plot in plots().items():
        assert plot.layout["xaxis"]["title"]["text"]
        assert plot.layout["yaxis"]["title"]["text"] or name == "allocations-by-rank"


def test_the_best_allocation_is_the_first_row_and_baselines_are_lines() -> None:
    made = plots()
    (heat,) = made["allocations-by-rank"].data
    best = read_findings(searched_study()).best
    assert best is not None
    assert heat["z"][0] == list(best.allocation.experts)
    assert heat["y"][0].startswith("1. ")
    lines = [t["name"] for t in made["best-so-far"].data if t["mode"] == "lines"]
    assert {"best so far", "uniform", "2468", "8642"} <= set(lines)


def test_a_study_without_results_has_a_note_and_no_plots() -> None:
    study = empty_study()
    refresh(study)
    assert "No allocation has finished" in get_note(study)
    assert all_plots(read_findings(study), []) == {}


def test_it_is_refreshed_when_a_phase_begins_and_then_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 2.0, 41.0, 43.0, 43.0, 45.0, 46.0, 47.0])
    monkeypatch.setattr(dashboard.time, "monotonic", lambda: next(times))
    refreshed: list[optuna.Study] = []
    monkeypatch.setattr(dashboard, "refresh", refreshed.append)
    study = empty_study()
    shown = Dashboard(study)
    ended = Ended(Job(0, named("5555", SPEC.budget), 0), "search", "COMPLETE", 1.0, 1.0)
    shown.apply(Phase("search", 0, 3, 1))  # from 0 to 2: the next one from 42 on
    assert len(refreshed) == 1
    shown.apply(ended)  # at 41
    assert len(refreshed) == 1
    shown.apply(ended)  # at 43
    assert len(refreshed) == 2


def test_failed_and_pruned_trials_say_so_in_their_notes() -> None:
    study = empty_study()
    failed = run_one(study, named("5555", SPEC.budget), end="fail")
    pruned = run_one(study, named("2468", SPEC.budget), end="prune")
    assert "**result**: failed: the worker &#60;b&#62;died" in get_note(failed)
    assert "**result**: pruned" in get_note(pruned)


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310
        return json.load(answer)
