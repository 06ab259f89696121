"""Kill a search again and again, and check that nothing that finished is lost, repeated or changed.

    python -m benchmarks.kill --kills 50

The workers only pretend to train; everything else is real: processes, the store, kill -9. Every
other time the driver is killed after a random time, else before a random one of its writes.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from pretend_search import Nursery, Search, check_finished, check_whole, nursery, study_of

from studies.records import TrialRecord

PACE = 0.02  # seconds of a poll, so that a search lasts several seconds
LONGEST = 1.5  # seconds until a kill, of which a start takes some
WRITES = 150  # statements until a kill, at most


@click.command()
@click.option("--kills", default=50, show_default=True, help="Only those that hit a search count.")
@click.option("--seed", default=0, show_default=True)
def main(kills: int, seed: int) -> None:
    """Print what is in the store after each kill; a search that ends is followed by another."""
    draw = random.Random(seed)  # noqa: S311
    print(f"{'kill':>4}  {'how':24}  complete  failed  waiting  running")
    hits, totals = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as name, nursery() as searches:
        folder, finished = _fresh(name, 0), []
        while hits < kills:
            how, search = _start(searches, folder, draw, hits)
            if search.wait() != -signal.SIGKILL:
                totals += _check(folder, finished)
                folder, finished = _fresh(name, hits), []
                continue
            hits += 1
            trials = study_of(folder)
            kept = {trial.number: trial for trial in trials}
            assert all(kept[trial.number] == trial for trial in finished), "a result changed"
            finished = [trial for trial in trials if trial.state in ("COMPLETE", "PRUNED")]
            states = Counter(trial.state for trial in trials)
            counts = [states[state] for state in ("COMPLETE", "FAIL", "WAITING", "RUNNING")]
            print(f"{hits:4}  {how:24}  {counts[0]:8}  {counts[1]:6}  {counts[2]:7}  {counts[3]:7}")
            if finished:
                check_whole(folder / "runs/mine/study.db")
        assert searches.start(folder, "--confirm-seeds", "2").wait() == 0
        totals += _check(folder, finished)
    assert totals["FAIL"], "no kill hit a trial"
    print(
        f"{hits} kills of {totals['searches']} searches, all finished: {totals['COMPLETE']} trials "
        f"complete, each once; {totals['FAIL']} that a kill ended, all run again"
    )


def _fresh(parent: str, number: int) -> Path:
    folder = Path(parent, str(number))
    folder.mkdir()
    return folder


def _start(searches: Nursery, folder: Path, draw: random.Random, number: int) -> tuple[str, Search]:
    """Start or continue a search that will be killed."""
    if number % 2:
        write = draw.randrange(1, WRITES)
        search = searches.start(folder, "--confirm-seeds", "2", pace=PACE, die_at=write)
        return f"before statement {write}", search
    seconds = draw.uniform(0.2, LONGEST)
    search = searches.start(folder, "--confirm-seeds", "2", pace=PACE)
    time.sleep(seconds)
    search.signal(signal.SIGKILL)
    return f"after {seconds:.2f} s", search


def _check(folder: Path, finished: list[TrialRecord]) -> Counter[str]:
    """Check a finished search, and count its trials by state."""
    check_finished(folder, finished, fresh_seeds=2)
    return Counter({"searches": 1}) + Counter(trial.state for trial in study_of(folder))


if __name__ == "__main__":
    main()
