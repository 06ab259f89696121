"""Say what a study found: the verdict, and a section of text, figures and tables per question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from mola.allocation import Allocation
from search.console.bars import spark
from search.console.display import duration
from search.report import figures, layer_figures
from search.report.findings import Findings
from search.report.marginal import FEWEST, Worth
from search.report.measures import cost, rank_correlation, time_spent
from search.report.parts import Section, Table


def verdict(findings: Findings) -> tuple[str, ...]:
    """Say the conclusion in two sentences: who won, and what may be claimed."""
    spec, winner = findings.spec, findings.winner
    if winner is None:
        return ("No allocation has finished, so there is nothing to conclude.",)
    allocation = Allocation(winner["experts"])
    tried = len({t.allocation for t in findings.trials if t.state in ("COMPLETE", "PRUNED")})
    error = winner["standard_error"]
    seeds = "one seed" if winner["seeds"] == 1 else f"{winner['seeds']} seeds"
    mean = f"{winner['mean']:.4f}" + (f" ± {error:.4f}" if error is not None else "")
    found = (
        f"Of {tried} allocations of {spec.total} experts over {spec.num_layers} layers, "
        f"{findings.called(allocation, winner['trial'])} ({allocation}) has the lowest mean "
        f"validation loss: {mean} {spec.objective} over {seeds}."
    )
    claim = findings.conclusion["text"]
    claimed = f"{claim[0].upper()}{claim[1:]}."
    if findings.finished:
        return found, claimed
    return found, claimed, "The search is not finished; this is what the trials so far say."


def sections(findings: Findings, worths: Sequence[Worth]) -> list[Section]:
    """Give the report's sections but the last, those with nothing to show left out."""
    parts = [
        _comparison(findings),
        _allocations(findings),
        _progress(findings),
        _lengths(findings),
        Section(
            "Loss and accuracy",
            figures=_drawn(
                figures.accuracy(findings),
                "Each point is an allocation that finished on the search's own seed. Where the "
                "two disagree, the loss decided: it is the smoother measure.",
            ),
        ),
        _worth(findings, worths),
        _routing(findings),
        _time(findings),
    ]
    return [part for part in parts if not part.empty]


def _comparison(findings: Findings) -> Section:
    rows = [_compared(findings, place) for place in range(len(findings.rows))]
    if not rows:
        return Section("Comparison with uniform")
    columns = ("allocation", "loss", "accuracy", "to uniform", "interval")
    shown = len(columns) if findings.conclusion["fresh_seeds"] else 3
    caption = (
        "Points are seeds, bars the simultaneous intervals of the mean over the fresh ones. "
        "A bar that crosses 0 is no evidence."
    )
    return Section(
        "Comparison with uniform",
        tuple(_what_is_compared(findings)),
        _drawn(figures.seeds(findings), caption),
        (Table(columns[:shown], tuple(row[:shown] for row in rows)),),
    )


def _compared(findings: Findings, place: int) -> tuple[str, ...]:
    """Write a row of the comparison."""
    row = findings.rows[place]
    error, known = row["standard_error"], row["difference"] is not None
    name = findings.called(Allocation(row["experts"]), row["trial"])
    reference = name == "uniform"
    bounded = known and row["low"] is not None and not reference
    return (
        f"{name} ({findings.first})" if place == 0 else name,
        f"{row['mean']:.4f}" + (f" ± {error:.4f}" if error is not None else ""),
        f"{row['accuracy']:.1%}",
        f"{row['difference']:+.4f}" if known and not reference else "",
        f"[{row['low']:+.4f}, {row['high']:+.4f}]" if bounded else "",
    )


def _what_is_compared(findings: Findings) -> Iterator[str]:
    """Say which seeds the columns rest on, and who did not run on all of them."""
    fresh, seeds = findings.conclusion["fresh_seeds"], findings.conclusion["table"][0]["seeds"]
    loss = f"Loss is the validation loss in {findings.spec.objective}, lower is better, as the mean"
    if seeds > 1:
        yield (
            f"{loss} over {seeds} seeds ± standard error. The search's own seed is one of them, "
            "and chose the finalists, which flatters them."
        )
    else:
        yield f"{loss} over 1 seed."
    if fresh:
        yield (
            "The differences to uniform rest on the fresh seeds alone "
            f"({', '.join(map(str, fresh))}), which the selection has not seen. Their intervals "
            f"hold together at {findings.conclusion['confidence']:.0%} (Bonferroni), with the "
            "residual pooled over all rows."
        )
    spread = findings.conclusion["spread"]
    if spread is not None:
        yield (
            f"The noise of one proxy is {spread['noise']:.4f} {findings.spec.objective}; the named "
            f"allocations differ by {spread['signal']:.4f} beside it (standard deviations)."
        )
    dropped = [
        findings.called(Allocation(row["experts"]), row["trial"])
        for row in findings.rows
        if row.get("dropped")
    ]
    if dropped:
        yield (
            f"Clearly behind after some of the fresh seeds, and not run on the rest: "
            f"{', '.join(dropped)}. Their numbers rest on the seeds that they ran."
        )


def _allocations(findings: Findings) -> Section:
    table = findings.rows
    highest = max((max(row["experts"]) for row in table), default=1)
    rows, drawn = [], []
    width = max((len(findings.called(*_which(row))) for row in table), default=0)
    for row in table:
        allocation, trial = _which(row)
        name = findings.called(allocation, trial)
        rows.append((name, str(allocation)))
        drawn.append(f"{name:<{width}}  {spark(allocation, highest)}")
    if not rows:
        return Section("Allocations")
    return Section(
        "Allocations",
        (
            "An allocation is a number of experts per layer, layer 0 first; 2x8 means eight "
            "layers with 2 each.",
        ),
        _drawn(layer_figures.allocations(findings), "Experts by depth, lowest mean loss first."),
        (Table(("allocation", "experts"), tuple(rows), left=2),),
        in_characters=tuple(drawn),
    )


def _which(row: Mapping[str, Any]) -> tuple[Allocation, int]:
    """Give the allocation and the trial of a row of the conclusion."""
    return Allocation(row["experts"]), row["trial"]


def _progress(findings: Findings) -> Section:
    counts = findings.counts
    states = {
        "complete": counts["COMPLETE"],
        "pruned": counts["PRUNED"],
        "failed": counts["FAIL"],
        "running": counts["RUNNING"],
        "waiting": counts["WAITING"],
    }
    said = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    reasons = sorted({t.reason for t in findings.trials if t.state == "FAIL" and t.reason})
    text = [f"Trials: {said or 'none yet'}. Repeats of allocations on fresh seeds are included."]
    text += [f"Why trials failed: {'; '.join(reasons[:5])}"] if reasons else []
    caption = (
        "Trials on the search's own seed. Dotted lines are the named allocations. A pruned trial "
        "stands at the loss of its last rung, which is higher than it would have ended, or at the "
        "upper edge."
    )
    return Section("The search", tuple(text), _drawn(figures.progress(findings), caption))


def _lengths(findings: Findings) -> Section:
    """Learning curves, and whether the order at a rung is the order at the end."""
    text, drawn = (
        [],
        list(
            _drawn(
                figures.curves(findings),
                "Validation loss by step, on the search's own seed. Crosses: pruned or failed "
                "trials, those far off at the upper edge."
                + (
                    f" Of more than {figures.MOST_CURVES} trials a part is shown."
                    if len(findings.trials) > figures.MOST_CURVES
                    else ""
                ),
            )
        ),
    )
    unit = findings.spec.objective
    for rung in findings.spec.rungs:
        both = [t for t in findings.complete if rung in t.rungs and t.objective is not None]
        short = [t.rungs[rung] for t in both]
        long = [t.objective for t in both if t.objective is not None]
        agreement = rank_correlation(short, long) if len(both) > 2 else None
        if agreement is None:
            continue
        text.append(
            f"The order after {rung} steps against that after {findings.spec.train.steps}: rank "
            f"correlation {agreement:+.2f} over {len(both)} allocations that were not pruned."
        )
        names = [
            findings.called(t.allocation, t.number) if t.allocation in findings.names else ""
            for t in both
        ]
        labels = (f"loss after {rung} steps, {unit}", f"loss at the end, {unit}")
        drawn += _drawn(
            figures.order(names, short, long, labels),
            f"Loss after {rung} steps and at the end, per allocation.",
        )
    return Section("Short and longer training", tuple(text), tuple(drawn))


def _worth(findings: Findings, worths: Sequence[Worth]) -> Section:
    title = "What an expert is worth, by depth"
    if not worths:
        if not findings.complete:
            return Section(title)
        return Section(title, (f"Fewer than {FEWEST} trials have finished: too few to say.",))
    unit = findings.spec.objective
    clear = [w.layer for w in worths if w.high is not None and w.high < 0]
    text = [
        "The sampler's model of the objective, asked about the winner: the expected change of the "
        "loss when a layer gets one more expert and the average other layer gives one, with the "
        "model's 95% interval. It is a model of short runs on few trials; the intervals hold one "
        "by one, and are on the wide side.",
        "Layers that would gain beyond doubt from one more expert: "
        f"{_listed(clear) if clear else 'none'}.",
    ]
    rows = _spare_rows(worths)
    tables: tuple[Table, ...] = ()
    if findings.resolution is None:
        text.append("Without replicates on fresh seeds nothing can be said about spare experts.")
    elif not rows:
        text.append(
            f"No layer could give up an expert with a loss surely below {findings.resolution:.4f} "
            f"{unit}, which is the smallest difference that this search can tell."
        )
    else:
        text.append(
            "Layers that could lose experts at no measurable loss, one layer at a time: the "
            "experts go one each to the layers that gain the most, and the loss grows, by the "
            f"upper end of the interval, by less than {findings.resolution:.4f} {unit}, the "
            "smallest difference that this search can tell."
        )
        tables = (Table(("layers", "experts", "could lose", "would keep"), rows),)
    caption = (
        "Change of the loss per expert that is moved into a layer; below 0 it pays. Layers that "
        "hold as many as they may have no point."
    )
    return Section(title, tuple(text), _drawn(layer_figures.worth(worths, unit), caption), tables)


def _spare_rows(worths: Sequence[Worth]) -> tuple[tuple[str, ...], ...]:
    """Give a row per stretch of layers that are alike and have experts to spare."""
    rows = []
    for (experts, spare), stretch in groupby(worths, key=lambda w: (w.experts, w.spare)):
        layers = [w.layer for w in stretch]
        if spare > 0:
            where = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
            rows.append((where, str(experts), str(spare), str(experts - spare)))
    return tuple(rows)


def _routing(findings: Findings) -> Section:
    winner = findings.winner
    trial = next((t for t in findings.trials if winner and t.number == winner["trial"]), None)
    caption = (
        "Above: how the router's picks spread over a layer's experts, the busiest at the bottom; "
        "equal heights are an even load. Below: the router's mean entropy, relative to that of an "
        "even choice (1). Layers with fewer than two experts have no choice to make."
    )
    return Section("Routing of the winner", figures=_drawn(layer_figures.routing(trial), caption))


def _time(findings: Findings) -> Section:
    spent, price = time_spent(findings.trials), cost(findings)
    text = []
    if spent is not None:
        text.append(
            f"Trials ran for {duration(spent.wall)}, on at most {spent.workers} "
            f"worker{'s' if spent.workers > 1 else ''} at a time."
        )
    if price is not None:
        text.append(
            f"The search trained on {price.rows:,} rows, as many as {price.by_rows:.1f} full "
            "fine-tunes of search.retrain's default length; all its workers' time, evaluations "
            f"and waiting included, would have trained {price.by_time:.1f} of them, at about "
            f"{duration(price.full_seconds)} each."
        )
    caption = "Where the workers' time went, from each trial's start to its end."
    return Section("Time and cost", tuple(text), _drawn(figures.time(findings), caption))


def _drawn(svg: str, caption: str) -> tuple[tuple[str, str], ...]:
    return ((svg, caption),) if svg else ()


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
