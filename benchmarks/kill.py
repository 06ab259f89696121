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

from pretend_search import check_finished, check_whole, nursery, study_of

PACE = 0.01  # seconds of a poll
LONGEST = 3.0  # seconds until a kill
WRITES = 400  # statements until a kill, at most


@click.command()
@click.option("--kills", default=50, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(kills: int, seed: int) -> None:
    """Print what is in the store after each kill."""
    draw = random.Random(seed)  # noqa: S311
    print(f"{'kill':>4}  {'how':24}  complete  failed  waiting  running")
    with tempfile.TemporaryDirectory() as name, nursery() as searches:
        folder, finished = Path(name), []
        for kill in range(1, kills + 1):
            if kill % 2:
                seconds = draw.uniform(0.2, LONGEST)
                search = searches.start(folder, "--confirm-seeds", "2", pace=PACE)
                time.sleep(seconds)
                search.signal(signal.SIGKILL)
                how = f"after {seconds:.2f} s"
            else:
                write = draw.randrange(1, WRITES)
                search = searches.start(folder, "--confirm-seeds", "2", die_at=write)
                how = f"before statement {write}"
            status = search.wait()
            trials = study_of(folder)
            kept = {trial.number: trial for trial in trials}
            assert all(kept[trial.number] == trial for trial in finished), "a result changed"
            finished = [trial for trial in trials if trial.state in ("COMPLETE", "PRUNED")]
            states = Counter(trial.state for trial in trials)
            counts = [states[state] for state in ("COMPLETE", "FAIL", "WAITING", "RUNNING")]
            how += "" if status == -signal.SIGKILL else f", status {status}"
            print(f"{kill:4}  {how:24}  {counts[0]:8}  {counts[1]:6}  {counts[2]:7}  {counts[3]:7}")
            if finished:
                check_whole(folder / "runs/mine/study.db")
        assert searches.start(folder, "--confirm-seeds", "2").wait() == 0
        check_finished(folder, finished, fresh_seeds=2)
        trials = study_of(folder)
    print(
        f"finished: {sum(t.state == 'COMPLETE' for t in trials)} complete, each once; "
        f"{sum(t.state == 'FAIL' for t in trials)} that a kill ended, all run again"
    )


if __name__ == "__main__":
    main()
