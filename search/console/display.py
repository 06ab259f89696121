"""Show a search while it runs: a live view on a terminal, a line per trial elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mola.allocation import Allocation
from mola.events import Rung
from search.console.bars import spark
from search.updates import Ended, Note, Phase, Progress, Started, Update
from search.workers.pool import Memory
from studies.store import REPLICATE, TrialRecord

REFRESHES_PER_SECOND = 4


@dataclass
class _Running:
    """A trial under way, as far as it is shown."""

    started: Started
    since: float
    step: int = 0
    loss: float | None = None
    rungs: list[float] = field(default_factory=list)
    memory: Memory | None = None


@dataclass
class Board:
    """What is known about a search, from the store and the updates since.

    Attributes:
        title: First words of the live view.
        uniform: The allocation to beat.
        steps: Optimizer steps of a trial.
        highest: Most experts that a layer may have.
        later: Trials of the confirmation that are not done, as long as it has not begun.
    """

    title: str
    uniform: Allocation
    steps: int
    highest: int
    later: int
    phase: Phase = field(default_factory=lambda: Phase("search", 0, 0, 0))
    counts: Counter[str] = field(default_factory=Counter)
    running: dict[int, _Running] = field(default_factory=dict)
    objectives: dict[int, float] = field(default_factory=dict)
    uniform_objective: float | None = None
    durations: list[float] = field(default_factory=list)

    def recall(self, records: Sequence[TrialRecord]) -> None:
        """Take over what the store knows."""
        for record in records:
            if record.state in ("COMPLETE", "PRUNED", "FAIL"):
                self.counts[record.state] += 1
            if record.state == "COMPLETE" and record.objective is not None:
                self._measured(record.number, record.label, record.allocation, record.objective)

    def apply(self, update: Update) -> None:
        """Take over an update."""
        if isinstance(update, Phase):
            self.phase = update
            self.later = self.later if update.name == "search" else 0
        elif isinstance(update, Started):
            self.running[update.job.number] = _Running(update, time.monotonic())
        elif isinstance(update, Progress):
            self._progress(update)
        elif isinstance(update, Ended):
            self._end(update)

    def best(self) -> tuple[int, float] | None:
        """Give number and objective of the best trial at the study's own seed."""
        if not self.objectives:
            return None
        number = min(self.objectives, key=lambda number: self.objectives[number])
        return number, self.objectives[number]

    def seconds_left(self) -> float | None:
        """Estimate the wall clock to the end; None before anything is known."""
        shares = [run.step / self.steps for run in self.running.values()]
        now = time.monotonic()
        if self.durations:
            each = sum(self.durations) / len(self.durations)
        elif sum(shares):
            each = sum(now - run.since for run in self.running.values()) / sum(shares)
        else:
            return None
        trials = self.phase.total - self.phase.done + self.later - sum(shares)
        return max(0.0, trials) * each / max(1, self.phase.workers)

    def _progress(self, update: Progress) -> None:
        run = self.running.get(update.number)
        if run is None:
            return
        if isinstance(update.event, Memory):
            run.memory = update.event
            return
        run.step = update.event.step
        if isinstance(update.event, Rung):
            run.rungs.append(update.event.objective)
        else:
            run.loss = update.event.loss

    def _end(self, ended: Ended) -> None:
        self.running.pop(ended.job.number, None)
        self.counts[ended.state] += 1
        if ended.state == "FAIL":
            return
        counts_here = (ended.label == REPLICATE) == (self.phase.name == "confirmation")
        if counts_here:
            self.phase = Phase(
                self.phase.name, self.phase.done + 1, self.phase.total, self.phase.workers
            )
        if ended.state == "COMPLETE" and ended.objective is not None:
            self.durations.append(ended.seconds)
            self._measured(ended.job.number, ended.label, ended.job.allocation, ended.objective)

    def _measured(self, number: int, label: str, allocation: Allocation, objective: float) -> None:
        """Take over a complete trial."""
        if label == REPLICATE:
            self.later = max(0, self.later - 1)
            return
        self.objectives[number] = objective
        if allocation == self.uniform:
            self.uniform_objective = objective


def trial_line(ended: Ended) -> str:
    """Say in a line how a trial went: `trial 17  2x8 4x8 6x8 8x8  nll 1.832  41 s`."""
    why = f"seed {ended.job.seed}" if ended.label == REPLICATE else ended.label
    if ended.state == "FAIL":
        result = f"failed: {ended.reason}"
    else:
        result = f"nll {ended.objective:.4f}" + (", pruned" if ended.state == "PRUNED" else "")
    note = "" if ended.label == "search" else f"  ({why})"
    head = f"trial {ended.job.number}  {ended.job.allocation}  {result}"
    return f"{head}  {ended.seconds:.0f} s{note}"


def duration(seconds: float) -> str:
    """Write a duration for people: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


@contextmanager
def display(board: Board, console: Console, *, quiet: bool) -> Iterator[Callable[[Update], None]]:
    """Open the display that suits the console and give the function that feeds it.

    Args:
        board: what is shown; kept up to date whatever the display.
        console: on stderr.
        quiet: show nothing.
    """
    if quiet:
        yield board.apply
    elif console.is_terminal:
        view = _View(board, console.encoding)
        with Live(
            view,
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as live:
            yield lambda update: _feed(board, update, live.console)
    else:
        yield lambda update: _feed(board, update, console)


def _feed(board: Board, update: Update, console: Console) -> None:
    board.apply(update)
    if isinstance(update, Ended):
        line = trial_line(update)
    elif isinstance(update, Note):
        line = update.text
    elif isinstance(update, Phase) and update.done < update.total:
        what = "allocations" if update.name == "search" else "trials"
        line = f"{update.name}: {update.total - update.done} of {update.total} {what} to run"
    else:
        return
    console.print(line, markup=False, highlight=False, soft_wrap=True)


class _View:
    """Draw the board; rich asks for it several times a second."""

    def __init__(self, board: Board, encoding: str) -> None:
        self.board = board
        self.encoding = encoding

    def __rich__(self) -> Group:
        return Group(self._summary(), self._table())

    def _summary(self) -> Text:
        board = self.board
        left = board.seconds_left()
        best = board.best()
        if not board.phase.total:
            return Text(f"{board.title}  starting the workers", style="bold")
        parts = [
            f"{board.title}  {board.phase.name} {board.phase.done}/{board.phase.total}"
            + (" allocations" if board.phase.name == "search" else ""),
            f"{board.counts['COMPLETE']} complete, {len(board.running)} running, "
            f"{board.counts['PRUNED']} pruned, {board.counts['FAIL']} failed",
        ]
        if best is not None:
            known = board.uniform_objective
            uniform = "" if known is None else f", uniform {known:.4f}"
            parts.append(f"best {best[1]:.4f} (trial {best[0]}){uniform}")
        parts.append("time left ?" if left is None else f"about {duration(left)} left")
        return Text(" | ".join(parts), style="bold")

    def _table(self) -> Table:
        board = self.board
        table = Table(box=None, padding=(0, 2, 0, 0))
        headings = ["trial", "experts by depth", "why", "step", "loss", "rungs", "time"]
        on_gpus = any(run.memory for run in board.running.values())
        for heading in [*headings, "GPU memory"] if on_gpus else headings:
            table.add_column(heading, justify="right" if heading == "step" else "left")
        for number, run in sorted(board.running.items()):
            job = run.started.job
            why = f"seed {job.seed}" if run.started.label == REPLICATE else run.started.label
            table.add_row(
                str(number),
                Text(spark(job.allocation, board.highest, self.encoding), no_wrap=True),
                why,
                f"{run.step}/{board.steps}",
                "" if run.loss is None else f"{run.loss:.3f}",
                " ".join(f"{value:.4f}" for value in run.rungs),
                duration(time.monotonic() - run.since),
                *([_gigabytes(run.memory)] if on_gpus else []),
            )
        return table


def _gigabytes(memory: Memory | None) -> str:
    if memory is None:
        return ""
    return f"{memory.used / 2**30:.1f} of {memory.total / 2**30:.0f} GiB"
