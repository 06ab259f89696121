"""Report on several budgets: quality against trainable parameters, and which step still pays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from search.budgets.compare import Budget, Budgets, Difference, Point, Step
from search.console.bars import spark
from search.console.command_line import module_command, study_place
from search.report.drawing import INK, MUTED, OTHER, UNIFORM, WINNER, sheet
from search.report.html import html_report
from search.report.markdown import markdown_report
from search.report.parts import Section, Table
from search.report.write import HTML_FILE, MARKDOWN_FILE
from studies.files import write_text_atomic

COLUMNS = ("experts", "parameters", "winner", "loss", "uniform's loss", "winner to uniform")


def write_budgets_report(budgets: Budgets, root: Path, storage: str | None) -> Path:
    """Write report.html and report.md to the folder of the search's name.

    Args:
        budgets: finished or not.
        root: folder of the studies.
        storage: URL, if they are not in the default place.

    Returns:
        The HTML file.

    Raises:
        OSError: a file cannot be written.
    """
    parts = [_quality(budgets), _which_step(budgets), _allocations(budgets)]
    parts += [_origin(budgets, root, storage)]
    claims, folder = verdict(budgets), root / budgets.name
    write_text_atomic(folder / HTML_FILE, html_report(budgets.name, claims, parts))
    write_text_atomic(folder / MARKDOWN_FILE, markdown_report(budgets.name, claims, parts))
    return folder / HTML_FILE


def verdict(budgets: Budgets) -> tuple[str, ...]:
    """Say which step still buys a gain that can be told from nothing, and no more."""
    if len(budgets.members) < 2:
        return (f"{budgets.members[0].total} experts are the only budget so far.",)
    said = []
    if not all(member.findings.finished for member in budgets.members):
        said.append("The search is not finished; this is what the trials so far say.")
    nexts = len(budgets.members) - 1
    single, whole = _known(budgets.steps[:nexts]), _known(budgets.steps[nexts:])
    if not single:
        return (*said, "Which budget pays cannot be said: too little ran on fresh seeds.")
    paying = [step for step in single if step.winners is not None and step.winners.gains]
    if paying:
        last = paying[-1]
        named = ", ".join(f"{step.low} to {step.high}" for step in paying)
        said.append(f"Experts buy a measurable gain from {named}.")
        if last is not single[-1]:
            said.append(f"Beyond {last.high} experts no step's gain can be told from nothing.")
    else:
        said.append("No step from a budget to the next buys a gain that can be told from nothing.")
        said += [
            f"From {step.low} to {step.high} altogether the gain is measurable."
            for step in whole
            if step.winners is not None and step.winners.gains
        ]
    said += [_said(budgets, step) for step in (*single, *whole)]
    return tuple(said)


def _known(steps: Sequence[Step]) -> list[Step]:
    """Leave out the steps between winners that have no interval."""
    return [s for s in steps if s.winners is not None and s.winners.high is not None]


def rows(budgets: Budgets) -> list[tuple[str, ...]]:
    """Give a row per budget for a table with `COLUMNS`."""
    return [
        (
            str(member.total),
            "" if member.winner is None else f"{member.winner.parameters:,}",
            "" if member.winner is None else member.winner.name,
            _mean(member.winner),
            _mean(member.uniform),
            _to_uniform(member),
        )
        for member in budgets.members
    ]


def step_rows(budgets: Budgets) -> list[tuple[str, ...]]:
    """Give a row per step: the budgets, the winners' difference, the uniform ones'."""
    return [
        (f"{step.low} to {step.high}", interval(step.winners), interval(step.uniform))
        for step in budgets.steps
    ]


def interval(difference: Difference | None) -> str:
    """Write a difference with its interval."""
    if difference is None:
        return ""
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.4f}"
    return f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"


def _said(budgets: Budgets, step: Step) -> str:
    assert step.winners is not None
    return (
        f"From {step.low} to {step.high} experts the winner's loss changes by "
        f"{interval(step.winners)} {budgets.unit}."
    )


def _mean(point: Point | None) -> str:
    return "" if point is None else f"{point.mean:.4f}"


def _to_uniform(member: Budget) -> str:
    row = member.findings.winner
    if row is None or row["difference"] is None:
        return ""
    return interval(Difference(row["difference"], row["low"], row["high"]))


def _quality(budgets: Budgets) -> Section:
    seeds = ", ".join(map(str, budgets.seeds))
    which = f"the fresh seeds {seeds}" if budgets.fresh else f"the search's own seed {seeds}"
    text = [
        f"Loss is the validation loss in {budgets.unit}, lower is better, mean over {which}, which "
        "all budgets share: trials of a seed see the same rows in the same order, whatever their "
        "budget, so that they are pairs. Parameters are counted as the MoLA paper does, with a "
        "router for each expert.",
    ]
    if budgets.fresh:
        text.append(
            "The winners were chosen among others, partly by these seeds, and the lowest of "
            "several flatters itself a little. What a winner gains over its own budget's uniform "
            "allocation is from that budget's study."
        )
    line = ", ".join(f"{p.parameters:,}" for p in budgets.pareto)
    if line:
        text.append(f"Trainable parameters of the winners that no smaller one equals: {line}.")
    caption = (
        "Difference to the smallest budget's uniform allocation on the same seeds, with intervals "
        "that hold together. The line joins the winners that no smaller one equals; below 0 is "
        "better. Small points: the other allocations that were confirmed."
    )
    drawn = figure(budgets)
    return Section(
        "Quality against trainable parameters",
        tuple(text),
        ((drawn, caption),) if drawn else (),
        (Table(COLUMNS, tuple(rows(budgets))),),
    )


def _which_step(budgets: Budgets) -> Section:
    if not budgets.steps:
        return Section("Which step pays")
    text = (
        "Differences between budgets, paired by seed; below 0 the larger budget is better. The "
        "intervals of the winners hold together at 95% whichever allocations had won (Bonferroni "
        "over all pairs that were confirmed), which makes them wide. No result has chosen the "
        "uniform allocations; their intervals hold together among themselves. A step is called a "
        "measurable gain when the winners' whole interval is below 0.",
    )
    table = Table(("experts", "winner", "uniform"), tuple(step_rows(budgets)))
    return Section("Which step pays", text, tables=(table,))


def _allocations(budgets: Budgets) -> Section:
    table, drawn = [], []
    for member in budgets.members:
        if member.winner is None:
            continue
        allocation, spec = member.winner.allocation, member.findings.spec
        drawn.append(f"{member.total:>6}  {spark(allocation, max(spec.budget.highs))}")
        table.append((str(member.total), member.findings.name, str(allocation)))
    if not table:
        return Section("The winners")
    return Section(
        "The winners",
        ("Experts by layer, layer 0 first. Each budget's own report is in its study's folder.",),
        tables=(Table(("experts", "study", "allocation"), tuple(table), left=3),),
        in_characters=tuple(drawn),
    )


def _origin(budgets: Budgets, root: Path, storage: str | None) -> Section:
    place = study_place(root, storage)
    commands: list[str] = []
    for member in budgets.members:
        commands += [run.command for run in member.findings.runs]
    for member in budgets.members:
        named = ("--study", member.findings.name, *place)
        commands.append(module_command("export", *named, "--out", f"winner-{member.total}.json"))
    commands.append(module_command("report", "--study", budgets.name, *place))
    return Section("To repeat it", code=tuple(dict.fromkeys(commands)))


def figure(budgets: Budgets) -> str:
    """Draw loss against trainable parameters; "" with fewer than two budgets to show."""
    shown = [m for m in budgets.members if m.winner is not None and m.winner.to_base is not None]
    if len(shown) < 2:
        return ""
    with sheet("budgets", 3.4) as page:
        (axes,) = page.axes
        axes.axhline(0, color=UNIFORM, lw=0.9, ls=":")
        for points, style, colour, size, label in (
            ([p for m in shown for p in m.others], "o", MUTED, 2.5, "other"),
            ([m.uniform for m in shown if m.uniform], "s", UNIFORM, 5, "uniform"),
        ):
            axes.plot(*_places(points), style, color=colour, ms=size, label=label)
        line = [p for p in budgets.pareto if p.to_base is not None]
        axes.plot(*_places(line), color=OTHER, label="no smaller one equals it")
        axes.plot(
            *_places([m.winner for m in shown if m.winner]), "o", color=WINNER, label="winner"
        )
        for member in shown:
            _annotate(axes, member)
        axes.margins(x=0.08)
        axes.set_xlabel("trainable parameters, millions")
        axes.set_ylabel(f"difference, {budgets.unit}")
        page.figure.legend(loc="outside upper left", ncols=4)
    return page.svg


def _annotate(axes, member: Budget) -> None:  # type: ignore[no-untyped-def]
    point = member.winner
    if point is None or point.to_base is None:
        return
    x = point.parameters / 1e6
    if point.to_base.low is not None and point.to_base.high is not None:
        axes.plot((x, x), (point.to_base.low, point.to_base.high), color=WINNER, lw=1)
    where = (x, point.to_base.mean)
    axes.annotate(str(member.total), where, (6, 4), textcoords="offset points", color=INK)


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    known = [(p.parameters / 1e6, p.to_base.mean) for p in points if p.to_base is not None]
    return [x for x, _ in known], [y for _, y in known]
