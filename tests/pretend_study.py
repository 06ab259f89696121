"""A study as a search leaves it, made without training: lower layers want the experts."""

from __future__ import annotations

import math
from typing import Any

import optuna

from mola.allocation import Allocation
from mola.events import Finished
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from search.conclude import candidates, conclude
from search.priors.named import named_allocations
from studies import encoding, store
from studies.provenance import note_run
from studies.records import SPEC_ATTR
from studies.spec import StudySpec

SPEC = StudySpec(
    num_layers=6,
    total=18,
    low=1,
    high=6,
    model=ModelSource("org/<i>model</i>"),
    model_fingerprint="weights-0123",
    data="rows<script>alert(1)</script>",
    data_fingerprint="rows-4567",
    prompt_template=None,
    max_length=64,
    adapter=AdapterSettings(),
    train=TrainSettings(steps=10, batch_size=4),
    rungs=(5,),
    seed=0,
    objective="nats per row",
)
PRUNED = Allocation([1, 1, 1, 3, 6, 6])
SEARCHED = (
    Allocation([6, 6, 3, 1, 1, 1]),
    Allocation([6, 4, 4, 2, 1, 1]),
    Allocation([1, 6, 1, 6, 1, 3]),
    Allocation([2, 3, 4, 4, 3, 2]),
)


def objective(allocation: Allocation, seed: int) -> float:
    """Every layer's return diminishes, a third of it from layer to layer; seeds move all alike."""
    returns = sum(math.log1p(n) / 1.5**layer for layer, n in enumerate(allocation.experts))
    jitter = sum(n * (layer + seed) ** 2 for layer, n in enumerate(allocation.experts)) % 7
    return 2 - 0.3 * returns + 0.05 * seed + jitter / 1000


def run_one(
    study: optuna.Study,
    allocation: Allocation,
    *,
    label: str = "search",
    seed: int = 0,
    end: str = "complete",
) -> optuna.Trial:
    """Record a trial; `end` is complete, prune, fail or leave."""
    store.enqueue(study, allocation, label=label, seed=seed)
    trial = study.ask()
    for name, range_ in encoding.distributions(SPEC.budget).items():
        trial.suggest_int(name, range_.low, range_.high)
    store.mark(trial, label=label, seed=seed)
    value = objective(allocation, seed)
    if label != "replicate":
        trial.report(value + 0.2, 5)
    if end == "complete":
        store.complete(study, trial, Finished(10, value, 0.75, 0.01, 3.0, 1.0, routing(allocation)))
    elif end == "prune":
        store.prune(study, trial)
    elif end == "fail":
        store.fail(study, trial, "the worker <b>died</b>", retry=False)
    return trial


def routing(allocation: Allocation) -> dict[str, Any]:
    """What routers would say that send most tokens to the first expert."""
    shares = [[1.0] if n == 1 else [1.0, *[1 / (n - 1)] * (n - 1)] for n in allocation.experts]
    entropy = [None if n == 1 else 0.8 for n in allocation.experts]
    return {"entropy": entropy, "load": shares}


def empty_study(name: str = "mine", storage: str | None = None) -> optuna.Study:
    """A study that knows its settings and has no trial."""
    study = optuna.create_study(study_name=name, storage=storage)
    study.set_user_attr(SPEC_ATTR, SPEC.to_json())
    return study


def searched_study(
    name: str = "mine", storage: str | None = None, *, confirm_seeds: int = 2
) -> optuna.Study:
    """A study whose search is over: named and searched allocations, one pruned, one failed."""
    study = empty_study(name, storage)
    command = "python -m search.run --budget 18"
    note_run(study, command, train_rows=100, validation_rows=20, goal=10, replicates=14)
    for allocation, names in named_allocations(SPEC.budget).items():
        run_one(study, allocation, label=f"named {','.join(names)}")
    for allocation in SEARCHED:
        run_one(study, allocation)
    run_one(study, PRUNED, end="prune")
    run_one(study, Allocation([1, 2, 3, 3, 4, 5]), end="fail")
    for seed in range(1, confirm_seeds + 1):
        for allocation in candidates(store.records(study), SPEC, 2, {}):
            run_one(study, allocation, label="replicate", seed=seed)
    store.set_conclusion(study, conclude(store.records(study), SPEC, confirm_seeds=confirm_seeds))
    return study
