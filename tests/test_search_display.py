"""What is shown while a search runs, and the bars that it is drawn with."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mola.allocation import Allocation
from mola.events import Rung, Step
from search.console.bars import chart, spark
from search.console.display import Board, display, duration, trial_line
from search.updates import Ended, Note, Phase, Progress, Started, Update
from search.workers.pool import Job, Memory

UNIFORM = Allocation([2, 2, 2, 2])
OTHER = Allocation([1, 1, 3, 3])


def make_board() -> Board:
    return Board(title="mine", uniform=UNIFORM, steps=10, highest=4, later=4)


def ended(number: int, allocation: Allocation, value: float, **changes: object) -> Ended:
    settings = {"label": "search", "state": "COMPLETE", "seconds": 20.0, **changes}
    return Ended(Job(number, allocation, 0), objective=value, **settings)  # type: ignore[arg-type]


def show(updates: list[Update], *, terminal: bool = False, quiet: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    with display(make_board(), console, quiet=quiet) as notify:
        for update in updates:
            notify(update)
    return stream.getvalue()


def test_a_trial_is_one_short_line() -> None:
    job = Job(17, Allocation.parse("2x8 4x8 6x8 8x8"), 0)
    line = trial_line(Ended(job, "search", "COMPLETE", 1.832, 41.2))
    assert line == "trial 17  2x8 4x8 6x8 8x8  nll 1.8320  41 s"
    assert "pruned" in trial_line(Ended(job, "search", "PRUNED", 1.9, 20.0))
    assert "(named 2468)" in trial_line(Ended(job, "named 2468", "COMPLETE", 1.8, 41.2))
    assert "(seed 0)" in trial_line(Ended(job, "replicate", "COMPLETE", 1.8, 41.2))
    failed = trial_line(Ended(job, "search", "FAIL", None, 3.0, "the worker died"))
    assert failed == "trial 17  2x8 4x8 6x8 8x8  failed: the worker died  3 s"


def test_elsewhere_than_on_a_terminal_there_are_plain_lines() -> None:
    text = show(
        [
            Phase("search", 0, 3, 2),
            Started(Job(0, UNIFORM, 0), "named 5555"),
            Progress(0, Step(1, 2.0)),
            ended(0, UNIFORM, 1.5, label="named 5555"),
            Note("the budget is exhausted [red]not markup[/red]"),
        ]
    )
    assert text.splitlines() == [
        "search: 3 of 3 allocations to run",
        "trial 0  2x4  nll 1.5000  20 s  (named 5555)",
        "the budget is exhausted [red]not markup[/red]",
    ]


def test_quiet_shows_nothing() -> None:
    assert show([Phase("search", 0, 3, 2), ended(0, UNIFORM, 1.5)], quiet=True) == ""


def test_a_terminal_shows_running_trials_best_uniform_and_time_left() -> None:
    text = show(
        [
            Phase("search", 0, 3, 2),
            ended(0, UNIFORM, 1.5),
            ended(1, OTHER, 1.4),
            Started(Job(2, OTHER, 0), "search"),
            Progress(2, Step(5, 1.23)),
            Progress(2, Rung(3, 1.83, 0.4)),
            Progress(2, Rung(5, 1.61, 0.5)),
            Progress(2, Step(5, 1.23)),
        ],
        terminal=True,
    )
    assert "GPU" not in text
    for part in (
        "search 2/3",
        "2 complete, 1 running, 0 pruned, 0 failed",
        "1.8300 1.6100",
        "best 1.4000 (trial 1)",
        "uniform 1.5000",
        "▂▂▆▆",
        "5/10",
        "1.230",
        "1.6100",
    ):
        assert part in text
    assert "trial 1  1x2 3x2  nll 1.4000" in text, "finished trials stay above the live view"


def test_a_worker_on_a_gpu_shows_its_memory() -> None:
    text = show(
        [
            Phase("search", 0, 3, 2),
            Started(Job(2, OTHER, 0), "search"),
            Progress(2, Step(5, 1.23)),
            Progress(2, Memory(int(12.5 * 2**30), 80 * 2**30)),
            Started(Job(3, UNIFORM, 0), "search"),
        ],
        terminal=True,
    )
    assert "GPU memory" in text
    assert "12.5 of 80 GiB" in text
    assert "5/10" in text


def test_the_time_left_counts_the_confirmation_and_the_workers() -> None:
    board = make_board()
    assert board.seconds_left() is None
    board.apply(Phase("search", 0, 3, 2))
    board.apply(ended(0, UNIFORM, 1.5))
    assert board.seconds_left() == pytest.approx((2 + 4) * 20 / 2)
    board.apply(Phase("confirmation", 0, 4, 2))
    assert board.seconds_left() == pytest.approx(4 * 20 / 2)


def test_pruned_trials_and_replicates_are_never_the_best() -> None:
    board = make_board()
    board.apply(Phase("search", 0, 3, 1))
    board.apply(ended(0, UNIFORM, 1.5))
    board.apply(ended(1, OTHER, 0.1, state="PRUNED"))
    board.apply(ended(2, OTHER, 0.1, label="replicate"))
    assert board.best() == (0, 1.5)
    assert board.uniform_objective == 1.5
    assert board.counts["PRUNED"] == 1


@pytest.mark.parametrize(
    ("seconds", "text"), [(40, "40 s"), (89.4, "89 s"), (720, "12 min"), (12600, "3.5 h")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_bar_per_layer_grows_with_its_experts() -> None:
    assert spark(Allocation([0, 1, 4, 8]), 8) == " ▁▄█"
    assert spark(Allocation([0, 1, 99]), 400)[1] == "▁", "one expert is never invisible"
    assert spark(Allocation([0, 1, 12]), 12, "ascii") == "01c"
    assert chart(Allocation([2, 0, 3])).splitlines() == [
        "  layer 0  ██ 2",
        "  layer 1   0",
        "  layer 2  ███ 3",
    ]
    assert "#" in chart(Allocation([2]), "latin-1")


def test_a_long_bar_is_scaled_to_fit_the_line() -> None:
    assert max(map(len, chart(Allocation([400, 1])).splitlines())) < 60
