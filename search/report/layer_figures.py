"""Draw the figures of the report that run over depth: allocations, routing, worth.

Each takes what it shows and gives an SVG, or "" with nothing to show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mola.allocation import Allocation
from search.report.drawing import BAD, MUTED, OTHER, UNIFORM, WINNER, sheet, whole_numbers
from search.report.findings import Findings
from search.report.marginal import Worth
from studies.records import TrialRecord

MOST_BARS = 10
DEPTH = "layer, 0 is next to the input"


def allocations(findings: Findings) -> str:
    """Draw the winner, the named baselines and the runners-up as bars over depth."""
    rows = findings.rows[:MOST_BARS]
    if not rows:
        return ""
    highest = max(max(row["experts"]) for row in rows)
    columns = 2 if len(rows) > 1 else 1
    lines = math.ceil(len(rows) / columns)
    options = {"sharex": True, "sharey": True}
    with sheet("bars", 0.5 + 1.05 * lines, rows=lines, columns=columns, **options) as page:
        for place, (axes, row) in enumerate(zip(page.axes, rows, strict=False)):
            allocation = Allocation(row["experts"])
            name = findings.called(allocation, row["trial"])
            edges = np.arange(allocation.num_layers + 1) - 0.5
            axes.stairs(allocation.experts, edges, fill=True, color=_colour(name, place))
            axes.set_title(
                f"{f'{findings.first}: ' if place == 0 else ''}{name}, {row['mean']:.4f}"
            )
            axes.set_ylim(0, highest * 1.05)
            axes.grid(visible=False, axis="x")
            whole_numbers(axes, x=True, y=True)
        for axes in page.axes[len(rows) :]:
            axes.set_visible(False)
        page.figure.supxlabel(DEPTH, fontsize=9)
        page.figure.supylabel("experts", fontsize=9)
    return page.svg


def routing(trial: TrialRecord | None) -> str:
    """Draw how evenly the routers of each layer spread the tokens, and how sure they are."""
    entropy = trial.routing.get("entropy", []) if trial is not None else []
    if trial is None or not any(value is not None for value in entropy):
        return ""
    from matplotlib.collections import PolyCollection

    layers = range(len(entropy))
    bars = _load_bars(trial.routing["load"])
    with sheet("routing", 3.6, rows=2, sharex=True) as page:
        load, sure = page.axes
        for strength, rectangles in bars.items():
            load.add_collection(
                PolyCollection(rectangles, facecolor=OTHER, alpha=strength), autolim=False
            )
        load.set_ylim(0, 100)
        load.set_xlim(-1, len(entropy))
        load.set_ylabel("share of the picks, %")
        shown = [math.nan if value is None else value for value in entropy]
        sure.plot(layers, shown, "o-", color=OTHER, ms=4)
        sure.set_ylim(0, 1.05)
        sure.set_ylabel("router entropy / ln N")
        sure.set_xlabel(DEPTH)
        whole_numbers(sure, x=True)
    return page.svg


def _load_bars(load: Sequence[Sequence[float]]) -> dict[float, list[list[tuple[float, float]]]]:
    """Stack each layer's shares of the picks to 100 %, as corners of rectangles by strength.

    A shape per share would take seconds in a deep model.
    """
    bars: dict[float, list[list[tuple[float, float]]]] = {}
    for layer, shares in enumerate(load):
        total, low = sum(shares) or 1.0, 0.0
        left, right = layer - 0.4, layer + 0.4
        for place, share in enumerate(shares):
            # Darker first: the busiest expert lies at the bottom.
            strength = max(0.15, 1 - 0.8 * place / max(1, len(shares) - 1))
            high = low + 100 * share / total
            corners = [(left, low), (left, high), (right, high), (right, low)]
            bars.setdefault(round(strength, 3), []).append(corners)
            low = high
    return bars


def worth(rows: Sequence[Worth], unit: str) -> str:
    """Draw what one more expert is worth by depth, with its interval."""
    if not rows:
        return ""
    with sheet("worth", 3.0) as page:
        (axes,) = page.axes
        axes.axhline(0, color=MUTED, lw=1)
        for row in rows:
            if row.change is None or row.low is None or row.high is None:
                continue  # a layer that is full
            colour = WINNER if row.high < 0 else BAD if row.low > 0 else OTHER
            axes.plot((row.layer, row.layer), (row.low, row.high), color=colour, lw=1.6)
            axes.plot(row.layer, row.change, "o", color=colour, ms=4)
        axes.set_xlabel("layer that gets one more expert, from the average other layer")
        axes.set_ylabel(f"change of the loss, {unit}\n(below 0 is better)")
        axes.set_xlim(-1, max(row.layer for row in rows) + 1)
        whole_numbers(axes, x=True)
    return page.svg


def _colour(name: str, place: int) -> str:
    if name == "uniform":
        return UNIFORM
    return WINNER if place == 0 else OTHER
