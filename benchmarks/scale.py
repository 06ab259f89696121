"""Measure a search at scale: thousands of trials, many layers, many workers, a worker's memory.

    python benchmarks/scale.py                            # all of it, a quarter of an hour
    python benchmarks/scale.py --parts workers --layers 32

`store`: a study of many finished trials is opened, asked, told and reported on, at a quarter, a
half and the whole of its length, and once as an older version has left it. `workers`: the driver
with simulated workers, whose trials last a second by the clock, so that nothing else should run.
`memory`: real proxies in a row on the built-in model, in one worker. Each measurement of a store
has a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import distribution_to_json
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy import insert

from mola.allocation import Allocation
from mola.demo import DEFAULTS
from mola.events import Event, Finished, Step
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from search.driver import Driver, Rules
from search.pruner import make_pruner
from search.sampler import make_sampler
from search.trials import StopRequestedError
from search.workers.pool import Failed, Job, Memory
from studies import store
from studies.encoding import distributions, to_params
from studies.records import RESULT_ATTRS
from studies.spec import StudySpec
from studies.trial_rows import PARAMS, PARAMS_ATTR, RUNGS, SYSTEM_ATTRS, TRIALS, USER_ATTRS, VALUES

PARTS = ("store", "workers", "memory")
TRIAL_SECONDS = 1.0
PROXIES = 20


def make_spec(layers: int) -> StudySpec:
    """Describe a search with five experts per layer."""
    return StudySpec(
        num_layers=layers,
        total=5 * layers,
        low=1,
        high=10,
        model=ModelSource(),
        model_fingerprint="simulated",
        data="simulated",
        data_fingerprint="simulated",
        prompt_template=None,
        max_length=64,
        adapter=AdapterSettings(),
        train=TrainSettings(steps=10),
        rungs=(5,),
        seed=0,
        objective="nats per row",
    )


def open_study(root: Path, spec: StudySpec, sampler: str = "budget") -> optuna.Study:
    """Open the study as `search.run` does."""
    return store.open_study(
        "scale",
        store.storage_url(root, "scale", None),
        spec,
        sampler=make_sampler(sampler, spec.budget, 0),
        pruner=make_pruner("median"),
    )


def simulate(allocation: Allocation, seed: int) -> Finished:
    """Give a result with diminishing returns, noise, and routing statistics of the usual size."""
    experts = allocation.experts
    rng = np.random.default_rng([seed, *experts])
    weights = 1.5 + np.sin(np.arange(len(experts)) / 5)
    value = 3.0 - float(weights @ np.log1p(experts)) / len(experts) + 0.01 * rng.normal()
    routing: dict[str, Any] = {
        "entropy": [None if n < 2 else 0.8123 for n in experts],
        "load": [rng.random(n).round(4).tolist() for n in experts],
    }
    return Finished(10, value, 0.5, 0.01, 0.8, 0.2, routing)


def fill(root: Path, layers: int, trials: int, *, old: bool) -> None:
    """Make a study of finished trials, a quarter of them pruned.

    Args:
        root: Of the studies.
        layers: Of the model.
        trials: Number of them.
        old: Leave out what older versions did not write.
    """
    spec = make_spec(layers)
    open_study(root, spec, "random")
    rng = np.random.default_rng(0)
    ranges = {
        n: (d.low, d.high, distribution_to_json(d)) for n, d in distributions(spec.budget).items()
    }
    rows: dict[Any, list[dict[str, Any]]] = {
        t: [] for t in (TRIALS, VALUES, PARAMS, USER_ATTRS, SYSTEM_ATTRS, RUNGS)
    }
    kinds = {"value_type": "FINITE"}, {"intermediate_value_type": "FINITE"}
    for number in range(trials):
        given, some = rng.integers(0, 5, layers // 2), rng.permutation(layers)
        experts = np.full(layers, 5)
        experts[some[: len(given)]] += given
        experts[some[len(given) : 2 * len(given)]] -= given
        allocation = Allocation(experts)
        result, pruned = simulate(allocation, 0), number % 4 == 3
        of = {"trial_id": number + 1}
        began = datetime(2026, 1, 1) + timedelta(seconds=10 * number)
        state = TrialState.PRUNED if pruned else TrialState.COMPLETE
        ended = {"datetime_start": began, "datetime_complete": began + timedelta(seconds=9)}
        rows[TRIALS].append({**of, "number": number, "study_id": 1, "state": state, **ended})
        value = result.objective + 0.2 * pruned
        rows[VALUES].append({**of, "objective": 0, "value": value, **kinds[0]})
        rung = {"step": 5, "intermediate_value": result.objective + 0.2}
        rows[RUNGS].append({**of, **rung, **kinds[1]})
        for name, count in to_params(allocation).items():
            named = {"param_name": name, "param_value": count, "distribution_json": ranges[name][2]}
            rows[PARAMS].append({**of, **named})
        attrs = {"label": "search", "seed": 0}
        if not pruned:
            attrs |= {name: getattr(result, name) for name in RESULT_ATTRS}
        for key, attr in attrs.items():
            rows[USER_ATTRS].append({**of, "key": key, "value_json": json.dumps(attr)})
        system = {"budget:allocation": str(allocation)}
        if not old:
            lows, highs, _ = zip(*ranges.values(), strict=True)
            document = {"experts": allocation.experts, "low": lows, "high": highs}
            system[PARAMS_ATTR] = document  # type: ignore[assignment]
        for key, attr in system.items():
            rows[SYSTEM_ATTRS].append({**of, "key": key, "value_json": json.dumps(attr)})
    with RDBStorage(store.storage_url(root, "scale", None)).engine.begin() as connection:
        for table, some in rows.items():
            connection.execute(insert(table), some)


def measure_store(root: Path, layers: int) -> None:
    """Measure what a driver does to a study, and its report."""
    from search.report.write import write_report

    spec = make_spec(layers)

    def begin() -> optuna.Study:
        study = open_study(root, spec)
        store.reconcile(study)
        store.records(study)
        return study

    def ask() -> optuna.Trial:
        with store.at_once(study):
            trial = study.ask()
            for name, range_ in distributions(spec.budget).items():
                trial.suggest_int(name, range_.low, range_.high)
            store.mark(trial, label=store.SEARCH, seed=0)
        return trial

    study = clocked("start-up", begin)
    trials = [clocked(f"ask {i}", ask) for i in range(4)]
    for i, trial in enumerate(trials):
        result = simulate(Allocation(list(trial.params.values())), 0)
        clocked(f"tell {i}", lambda t=trial, r=result: store.complete(study, t, r))
    clocked("report", lambda: write_report(study, root, None))


def clocked(name: str, action: Callable[[], Any]) -> Any:
    """Do something; print how long it took, and the most memory that the process had so far."""
    wall, processor = time.perf_counter(), time.process_time()
    result = action()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"  {name:12}{wall:8.2f} s {processor:8.2f} s CPU {peak:8.0f} MiB", flush=True)
    return result


class SimulatedPool:
    """Workers whose trials take TRIAL_SECONDS and nothing else.

    Attributes:
        busy: Seconds in which workers had a trial, all workers together.
        elapsed: Seconds from the first trial's start to the last one's.
        processor: Seconds of the processor in all, of all threads.
        done: Trials that ended.
    """

    def __init__(self, size: int, most_seconds: float) -> None:
        self.size = size
        self.busy = self.elapsed = self.processor = 0.0
        self.done = 0
        self._most = most_seconds
        self._began = time.monotonic()
        self._processor = time.process_time()
        self._running: dict[int, tuple[float, Job]] = {}  # when it ends, by number

    def is_late(self) -> bool:
        """Say whether the measurement has taken long enough."""
        return time.monotonic() - self._began > self._most

    @property
    def idle(self) -> int:
        """Number of workers without a trial."""
        return self.size - len(self._running)

    def start(self, job: Job) -> None:
        """Start a trial."""
        now = time.monotonic()
        if not self._running and not self.done:
            self._began, self._processor = now, time.process_time()
        self._running[job.number] = now + TRIAL_SECONDS, job
        self.elapsed = now - self._began
        self.busy = TRIAL_SECONDS * (self.done + len(self._running)) - sum(
            end - now for end, _ in self._running.values() if end > now
        )

    def poll(self, timeout_seconds: float) -> list[tuple[int, Event | Failed | Memory]]:
        """Wait for the next end, and give the trials that have ended."""
        if self._running:
            until = min(end for end, _ in self._running.values()) - time.monotonic()
            time.sleep(max(0.0, min(until, timeout_seconds)))
        now = time.monotonic()
        events: list[tuple[int, Event | Failed | Memory]] = []
        for number, (end, job) in list(self._running.items()):
            if end <= now:
                del self._running[number]
                self.done += 1
                events += [(number, Step(10, 1.0)), (number, simulate(job.allocation, job.seed))]
        return events

    def resume(self, number: int) -> None:
        """Go on after a rung; these trials have none."""

    def stop(self, number: int) -> None:
        """End a trial."""
        self._running.pop(number, None)

    def close(self) -> None:
        """End the simulation."""
        self.processor = time.process_time() - self._processor


def measure_workers(layers: int, workers: int, trials: int, sampler: str, most: float) -> None:
    """Run a search with simulated workers, and print how busy they were.

    Args:
        layers: Of the model.
        workers: Number of them.
        trials: Of the search.
        sampler: Its name.
        most: Seconds after which the search is stopped.
    """
    spec = make_spec(layers)
    with tempfile.TemporaryDirectory() as folder:
        study = open_study(Path(folder), spec, sampler)
        pool = SimulatedPool(workers, most)
        rules = Rules(trials=trials, finalists=1, confirm_seeds=0)
        driver = Driver(study, spec, lambda: pool, rules, stop_requested=pool.is_late)
        with contextlib.suppress(StopRequestedError):
            driver.run()
    busy = pool.busy / (workers * pool.elapsed)
    each = 1000 * pool.processor / max(1, pool.done)
    print(
        f"  {sampler:8}{layers:4} layers {workers:3} workers {pool.done:5} trials: "
        f"{busy:6.1%} busy, {each:6.1f} ms of the driver per trial",
        flush=True,
    )


def measure_memory() -> None:
    """Run proxies in one worker, and print its resident memory after each."""
    from mola.base import load_tokenizer
    from mola.data import encode_splits, load_splits
    from search.workers.proxy import ProxyWorker, Task

    source = ModelSource()
    splits = load_splits(None, limit_validation=int(DEFAULTS["validation_rows"]))
    data = encode_splits(
        splits, load_tokenizer(source), prompt_template=None, max_length=64, name="built-in"
    )
    train = TrainSettings(steps=7, batch_size=16, learning_rate=3e-3)
    worker = ProxyWorker(Task(source, AdapterSettings(), train), data, "cpu", 1)
    worker.load()
    rng = np.random.default_rng(0)
    budget = make_spec(32).budget
    sizes = []
    for number in range(PROXIES):
        events = worker.start(Job(number, budget.uniform(rng), number), 3600)
        assert isinstance(events[-1], Finished)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sizes.append(pages * resource.getpagesize() / 2**20)
    print("  MiB after each proxy:", " ".join(f"{size:.0f}" for size in sizes))
    print(f"  the last to the third: {sizes[-1] / sizes[2] - 1:+.1%}", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--trials", type=int, default=5000, help="finished ones in the store")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--sampler", default="budget")
    parser.add_argument("--seconds", type=float, default=120, help="a search takes at most")
    parser.add_argument("--root", type=Path, help="measure the study that lies here, and no more")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if args.root is not None:
        measure_store(args.root, args.layers)
        return
    if "store" in args.parts:
        for share, old in ((4, False), (2, False), (1, False), (1, True)):
            trials = args.trials // share
            by = ", of an older version" if old else ""
            print(f"a study of {trials} trials, {args.layers} layers{by}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                fill(Path(folder), args.layers, trials, old=old)
                here = [sys.executable, __file__, "--layers", str(args.layers), "--root", folder]
                subprocess.run(here, check=True)  # noqa: S603
    if "workers" in args.parts:
        print(f"simulated workers, trials of {TRIAL_SECONDS:g} s")
        trials = 20 * args.workers
        measure_workers(args.layers, args.workers, trials, args.sampler, args.seconds)
    if "memory" in args.parts:
        print(f"{PROXIES} proxies in a row in one worker")
        measure_memory()


if __name__ == "__main__":
    main()
