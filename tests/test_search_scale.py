"""A search at scale: long histories, workers that run many trials, nodes that come and go."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from pretend_pool import no_waiting_for_the_disk
from sqlalchemy import event

import search.workers.ray_pool
from mola.allocation import Allocation, ExpertBudget
from mola.data import TaskData, encode_splits, load_splits
from mola.events import Event, Finished, Step
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from search.driver import Driver, Rules
from search.priors.named import named_allocations
from search.sampler import BudgetSampler
from search.sampler.history import all_trials, read_history
from search.updates import Ended, Update
from search.workers.pool import Failed, Job
from search.workers.proxy import ProxyWorker, Task
from search.workers.ray_pool import RayPool
from studies import store
from studies.encoding import distributions, to_params
from studies.spec import StudySpec
from studies.trial_storage import TrialStorage

__all__ = ["no_waiting_for_the_disk"]
pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")
BUDGET = ExpertBudget(12, 48, 1, 8)
JOB = Job(0, Allocation([1, 2, 3, 2]), 0)
ADAPTER, TRAIN = AdapterSettings(r=2), TrainSettings(steps=2, batch_size=4)
SPEC = StudySpec(
    num_layers=4,
    total=12,
    low=1,
    high=6,
    model=ModelSource(),
    model_fingerprint="m",
    data="pretence",
    data_fingerprint="d",
    prompt_template=None,
    max_length=64,
    adapter=AdapterSettings(),
    train=TrainSettings(steps=4),
    rungs=(),
    seed=7,
    objective="nats per row",
)


def long_study(trials: int) -> optuna.Study:
    """A study in memory of random allocations whose values are random, too."""
    rng = np.random.default_rng(0)
    study = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=0))
    space = dict(distributions(BUDGET))
    for _ in range(trials):
        params = to_params(BUDGET.uniform(rng))
        value = float(rng.normal())
        study.add_trial(optuna.create_trial(params=params, distributions=space, value=value))
    return study


def test_of_a_long_history_the_best_the_latest_and_some_of_all_others_are_looked_at() -> None:
    study = long_study(900)
    seen = read_history(all_trials(study), BUDGET, study.direction).measured.observations
    values = [trial.value for trial in study.trials]
    assert len(seen.values) == 400
    assert set(sorted(values)[:200]) <= set(seen.values.tolist())
    assert set(values[-50:]) <= set(seen.values.tolist())
    assert max(values) in seen.values
    assert len(set(seen.values.tolist())) == 400
    order = [values.index(value) for value in seen.values.tolist()]
    assert order == sorted(order)


def test_a_history_of_five_hundred_is_looked_at_whole() -> None:
    study = long_study(500)
    seen = read_history(all_trials(study), BUDGET, study.direction).measured.observations
    assert seen.values.tolist() == [trial.value for trial in study.trials]


def statements(study: optuna.Study) -> int:
    """Count what is asked of the database for a trial, from ask to tell."""
    storage, seen = study._storage, []
    assert isinstance(storage, TrialStorage)
    engine = storage._backend.engine

    def count(*args: Any) -> None:
        seen.append(args[2])

    event.listen(engine, "before_cursor_execute", count)
    trial = study.ask()
    with store.at_once(study):
        for name, range_ in distributions(SPEC.budget).items():
            trial.suggest_int(name, range_.low, range_.high)
    store.complete(study, trial, Finished(4, 1.0, 0.5, 0.01, 1.0, 0.1))
    store.records(study)
    event.remove(engine, "before_cursor_execute", count)
    return len(seen)


def test_a_trial_asks_the_database_no_more_when_the_study_is_long(tmp_path: Path) -> None:
    url = store.storage_url(tmp_path, "s", None)
    study = store.open_study(
        "s",
        url,
        SPEC,
        sampler=BudgetSampler(SPEC.budget, seed=0),
        pruner=optuna.pruners.NopPruner(),
    )
    statements(study)
    early = statements(study)
    for _ in range(20):
        late = statements(study)
    assert late == early


@pytest.fixture(scope="module")
def data(tiny_model_dir: Path, choices_dir: Path) -> TaskData:
    from mola.base import load_tokenizer

    return encode_splits(
        load_splits(str(choices_dir)),
        load_tokenizer(ModelSource(str(tiny_model_dir))),
        prompt_template=None,
        max_length=256,
        name="choices",
    )


def run(worker: ProxyWorker, job: Job) -> float:
    events = worker.start(job, 60)
    while not isinstance(events[-1], Finished):
        events += worker.advance(60)
    return events[-1].objective


def other_job(number: int) -> Job:
    experts = [1 + number % 3, 2, 1, 4 - number % 3]
    return Job(number, Allocation(experts), number, rungs=(1,) if number % 2 else ())


def run_through(worker: ProxyWorker, job: Job) -> None:
    events = worker.start(job, 60)
    while not isinstance(events[-1], Finished):
        events = worker.advance(60)


def live() -> tuple[int, int]:
    """Count the tensors that are alive, and their elements."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    return len(tensors), sum(tensor.numel() for tensor in tensors)


def test_a_trial_leaves_no_tensor_behind(tiny_model_dir: Path, data: TaskData) -> None:
    worker = ProxyWorker(Task(ModelSource(str(tiny_model_dir)), ADAPTER, TRAIN), data, "cpu", 1)
    worker.load()
    counts = []
    for number in range(8):
        run_through(worker, Job(number, JOB.allocation, number))
        counts.append(live())
    assert counts[2] == counts[7]


@pytest.mark.timeout(400)  # four processes start, and have to share the cores
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_trial_ends_alike_as_the_first_and_the_tenth_on_one_worker_and_on_four(
    tiny_model_dir: Path, data: TaskData
) -> None:
    task = Task(ModelSource(str(tiny_model_dir)), ADAPTER, TRAIN)
    worker = ProxyWorker(task, data, "cpu", 1)
    worker.load()
    first = run(worker, JOB)
    for number in range(1, 9):
        run_through(worker, other_job(number))
    assert run(worker, JOB) == first

    pool = RayPool(task, data, workers=4)
    try:
        while pool.idle < 4:
            pool.poll(60)
        for number in range(4):
            pool.start(Job(number, JOB.allocation, JOB.seed))
        ended: dict[int, Event] = {}
        while len(ended) < 4:
            ended |= {n: e for n, e in pool.poll(60) if not isinstance(e, Step)}
        assert [getattr(e, "objective", e) for e in ended.values()] == [first] * 4
    finally:
        close(pool)


def close(pool: RayPool) -> None:
    """Close a pool, and let go of Ray's processes, which it kills but does not wait for."""
    pool.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


FOR_LONG = 99  # seed of a trial without an end


class NodeWorker(ProxyWorker):
    """Pretends to train, many short steps long, and says on which node it did."""

    def load(self) -> int:
        return os.getpid()

    def start(self, job: Job, max_seconds: float) -> list[Any]:
        self._job, self._step = job, 0
        return self.advance(max_seconds)

    def advance(self, max_seconds: float) -> list[Any]:
        import ray

        self._step += 1
        if self._step < 30 or self._job.seed == FOR_LONG:
            return [Step(self._step, 1.0)]
        value = sum(n * (layer + 1) for layer, n in enumerate(self._job.allocation.experts))
        node = ray.get_runtime_context().get_node_id()
        return [Finished(30, value / 10, 0.5, 0.01, 1.0, 0.1, {"node": node})]

    def stop(self) -> None:
        pass


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Three nodes on this machine, or as many as a test asks for, a core each."""
    import ray
    from ray.cluster_utils import Cluster

    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": soon},
        )
        for _ in range(getattr(request, "param", 3) - 1):
            made.add_node(num_cpus=1)
        yield made
        ray.shutdown()
        made.shutdown()
        gc.collect()


class Trouble:
    """Takes a node away while a trial runs on it, and adds another once the trial was lost."""

    def __init__(self, cluster: Any, study: optuna.Study) -> None:
        self.cluster, self.study = cluster, study
        self.pool: RayPool | None = None
        self.lost: list[Ended] = []
        self.gone = self.fresh = ""

    def __call__(self, update: Update) -> None:
        if not isinstance(update, Ended):
            return
        if update.state == "FAIL":
            self.lost.append(update)
            if not self.fresh:
                self.fresh = self.cluster.add_node(num_cpus=1).node_id
                self.wait_for_the_new_worker()
        elif not self.gone and len(nodes_of(self.study)) == 3:
            here = next(r for r in store.records(self.study) if r.number == update.job.number)
            others = [n for n in self.cluster.worker_nodes if n.node_id != here.routing["node"]]
            victim = sorted(others, key=lambda n: n.node_id)[0]
            self.gone = victim.node_id
            self.cluster.remove_node(victim, allow_graceful=False)

    def wait_for_the_new_worker(self) -> None:
        """Let it come up before the others have done all the work."""
        import ray

        assert self.pool is not None
        calls = [w.call for w in self.pool._workers if w.state.name == "LOADING"]
        ray.wait(calls, num_returns=len(calls), timeout=300)


def nodes_of(study: optuna.Study) -> set[str]:
    return {r.routing["node"] for r in store.records(study) if r.state == "COMPLETE"}


@pytest.mark.timeout(400)  # four nodes and as many workers start, and have to share the cores
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_node_that_dies_loses_a_trial_and_one_that_joins_takes_over(
    cluster: Any, data: TaskData
) -> None:
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    study = optuna.create_study(sampler=BudgetSampler(SPEC.budget, seed=0))
    study.set_user_attr("spec", SPEC.to_json())
    trouble = Trouble(cluster, study)
    rules = Rules(trials=25, finalists=1, confirm_seeds=2)
    pools: list[RayPool] = []

    def open_pool() -> RayPool:
        task = Task(ModelSource(), ADAPTER, TRAIN)
        pools.append(RayPool(task, data, workers=3, address=cluster.address, worker=NodeWorker))
        trouble.pool = pools[0]
        while pools[0].idle < 3:
            pools[0].poll(60)
        return pools[0]

    try:
        Driver(study, SPEC, open_pool, rules, notify=trouble).run()
    finally:  # the driver has closed the pool
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    records = store.records(study)
    states = Counter(record.state for record in records)
    assert trouble.gone, "the search ended before three nodes had run a trial"
    assert states["FAIL"] == len(trouble.lost) >= 1
    assert "died" in trouble.lost[0].reason or "node" in trouble.lost[0].reason
    done = {(r.allocation, r.seed) for r in records if r.state == "COMPLETE"}
    assert {(e.job.allocation, e.job.seed) for e in trouble.lost} <= done
    assert trouble.fresh in nodes_of(study), "nothing ran on the node that joined"
    own = [r for r in records if r.state == "COMPLETE" and r.label != store.REPLICATE]
    assert len({r.allocation for r in own}) == rules.trials
    assert {r.allocation for r in own} >= set(named_allocations(SPEC.budget))
    assert states["WAITING"] == states["RUNNING"] == 0


@pytest.mark.parametrize("cluster", [1], indirect=True)
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_workers_follow_the_nodes_unless_their_number_was_given(
    cluster: Any, data: TaskData, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(search.workers.ray_pool, "HEALTH_SECONDS", 0)
    monkeypatch.setattr(search.workers.ray_pool, "GROWTH_SECONDS", 0)
    task = Task(ModelSource(), ADAPTER, TRAIN)
    allocation = Allocation([3, 3, 3, 3])

    def busy(pool: RayPool, first: int) -> None:
        """Give every worker a trial, and poll as often as that may change anything."""
        for number in range(first, first + pool.idle):
            pool.start(Job(number, allocation, FOR_LONG))
        for _ in range(5):
            pool.poll(60)

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        left = RayPool(task, data, address=cluster.address, worker=NodeWorker)
        given = RayPool(task, data, workers=1, address=cluster.address, worker=NodeWorker)
        assert (left.size, given.size) == (1, 1)
        given.close()
        while not left.idle:
            left.poll(60)
        fresh = cluster.add_node(num_cpus=2)
        left.poll(60)
        assert left.size == 1, "there is nothing to do for another worker"
        busy(left, 0)
        assert left.size == 3
        while left.idle < 2:
            left.poll(60)
        busy(left, 10)
        cluster.remove_node(fresh, allow_graceful=False)
        lost: list[int] = []
        while left.size > 1:
            lost += [number for number, event in left.poll(60) if isinstance(event, Failed)]
        assert sorted(lost) == [10, 11]
        left.close()

        given = RayPool(task, data, workers=1, address=cluster.address, worker=NodeWorker)
        while not given.idle:
            given.poll(60)
        cluster.add_node(num_cpus=1)
        busy(given, 20)
        assert given.size == 1
        given.close()
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
