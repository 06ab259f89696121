"""Make the dashboard's plots as Plotly's JSON, which the dashboard itself draws.

A figure is a dictionary of `data` and `layout`; Plotly's Python package is not needed to write one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from search.report.findings import Findings
from search.report.marginal import Worth
from search.report.measures import best_so_far
from studies.records import REPLICATE, TrialRecord

MOST_ROWS = 30  # of the heat map: as many as the dashboard's card has room for
MOST_POINTS = 500  # of one kind: the database takes a plot in pieces of two kilobytes
BLUE, ORANGE, GREEN, RED, GREY = "#0a6ab4", "#b45309", "#4f7f68", "#b3261e", "#8a9097"


@dataclass(frozen=True)
class Plot:
    """A figure for the dashboard.

    Attributes:
        data: Plotly traces.
        layout: Plotly layout.
    """

    data: tuple[dict[str, Any], ...]
    layout: dict[str, Any]

    def to_json(self) -> str:
        """Write the figure, as a Plotly figure does."""
        return json.dumps({"data": self.data, "layout": self.layout}, allow_nan=False)


def all_plots(findings: Findings, worths: Sequence[Worth]) -> dict[str, Plot]:
    """Make every plot that there are trials for, by its id in the dashboard."""
    plots: dict[str, Plot] = {}
    done = sorted(findings.complete, key=lambda t: (_value(t), t.number))
    if done:
        plots["allocations-by-rank"] = _by_rank(findings, done[:MOST_ROWS])
        plots["best-so-far"] = _progress(findings)
        plots["loss-against-training-time"] = _cost(findings)
    if worths:
        plots["worth-by-depth"] = _worth(findings, worths)
    return plots


def _by_rank(findings: Findings, ranked: Sequence[TrialRecord]) -> Plot:
    names = [
        f"{rank}. {findings.called(t.allocation, t.number)}, {_value(t):.4f}"
        for rank, t in enumerate(ranked, start=1)
    ]
    heat = {
        "type": "heatmap",
        "z": [list(t.allocation.experts) for t in ranked],
        "y": names,
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": "experts"}},
        "hovertemplate": "%{y}<br>layer %{x}: %{z} experts<extra></extra>",
    }
    layout = _layout("Allocations, the best at the top", "layer, 0 is next to the input", "")
    layout["yaxis"].update({"autorange": "reversed", "automargin": True})
    return Plot((heat,), layout)


def _progress(findings: Findings) -> Plot:
    own = [t for t in findings.trials if t.label != REPLICATE and t.objective is not None]
    done = [t for t in own if t.state == "COMPLETE"]
    pruned = [t for t in own if t.state == "PRUNED"]
    best = best_so_far(done)
    steps = [*best, (max(t.number for t in own), best[-1][1])]
    traces = [
        _points("complete", done, GREEN),
        {**_points("pruned, at its last rung", pruned, RED), "marker": _marker(RED, "x")},
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best so far",
            "x": [number for number, _ in steps],
            "y": [value for _, value in steps],
            "line": {"shape": "hv", "color": BLUE},
        },
    ]
    first, last = min(t.number for t in own), max(t.number for t in own)
    for trial in done:
        if trial.allocation in findings.names:
            name = findings.called(trial.allocation, trial.number)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": name,
                    "x": [first, last],
                    "y": [_value(trial)] * 2,
                    "line": {"dash": "dot", "color": ORANGE if name == "uniform" else GREY},
                }
            )
    layout = _layout("Best so far, and the named baselines", "trial", _loss(findings))
    return Plot(tuple(traces), layout)


def _worth(findings: Findings, worths: Sequence[Worth]) -> Plot:
    known = [w for w in worths if w.change is not None and w.high is not None]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [w.layer for w in known],
        "y": [w.change for w in known],
        "error_y": {
            "type": "data",
            "array": [(w.high or 0.0) - (w.change or 0.0) for w in known],
        },
        "marker": _marker(BLUE, "circle"),
    }
    layout = _layout(
        "One more expert, by depth (model, 95%)",
        "layer that gets it, from the average other layer",
        f"change of the loss, {findings.spec.objective}",
    )
    return Plot((trace,), layout)


def _cost(findings: Findings) -> Plot:
    timed = _some([t for t in findings.complete if t.train_seconds is not None])
    trace = _points("allocation", timed, GREEN)
    trace["x"] = [t.train_seconds for t in timed]
    return Plot(
        (trace,),
        _layout("Loss against training time", "training time of a trial, s", _loss(findings)),
    )


def _points(name: str, trials: Sequence[TrialRecord], colour: str) -> dict[str, Any]:
    trials = _some(trials)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [t.number for t in trials],
        "y": [_value(t) for t in trials],
        "text": [f"trial {t.number}: {t.allocation}" for t in trials],
        "marker": _marker(colour, "circle"),
    }


def _some(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Keep the better half of what there is room for, and the rest evenly."""
    ranked = sorted(trials, key=lambda t: (_value(t), t.number))
    best, rest = ranked[: MOST_POINTS // 2], ranked[MOST_POINTS // 2 :]
    step = max(1, math.ceil(len(rest) / (MOST_POINTS - len(best)))) if rest else 1
    return sorted([*best, *rest[::step]], key=lambda t: t.number)


def _marker(colour: str, symbol: str) -> dict[str, Any]:
    return {"color": colour, "symbol": symbol, "size": 7}


def _layout(title: str, x: str, y: str) -> dict[str, Any]:
    return {
        "title": {"text": title},
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}},
    }


def _loss(findings: Findings) -> str:
    return f"validation loss, {findings.spec.objective}"


def _value(trial: TrialRecord) -> float:
    assert trial.objective is not None
    return trial.objective
