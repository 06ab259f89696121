"""A Ray Tune searcher over a study: its protocol by hand, and a real `Tuner` with ASHA."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import ray.util.client
from pretend_pool import no_waiting_for_the_disk
from test_studies_store import SPEC

from mola.allocation import Allocation, ExpertBudget
from search.priors.named import named_allocations
from search.sampler import BudgetSampler
from search.tune import BudgetSearcher
from studies.claim import claim
from studies.encoding import from_params, to_params
from studies.store import open_study, reconcile, records

__all__ = ["no_waiting_for_the_disk"]
pytestmark = [
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # SQLAlchemy's pool at the end
]
BUDGET = ExpertBudget(4, 12)


@pytest.fixture
def url(tmp_path: Path) -> str:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return f"sqlite:///{tmp_path}/study.db"


def searcher(url: str, **settings: Any) -> BudgetSearcher:
    budget = settings.pop("budget", BUDGET)
    given = {"metric": "loss", "mode": "min", "storage": url, **settings}
    return BudgetSearcher("mine", budget, **given)


def trials(url: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="mine", storage=url).get_trials()


def result(step: int, loss: Any, **more: Any) -> dict[str, Any]:
    return {"training_iteration": step, "loss": loss, **more}


def test_the_named_shapes_come_first_and_then_the_samplers_proposals(url: str) -> None:
    tune = searcher(url)
    configs = [tune.suggest(f"t{i}") for i in range(8)]
    allocations = [Allocation(c["experts"]) for c in configs if isinstance(c, dict)]
    named = list(named_allocations(BUDGET))
    assert allocations[: len(named)] == named
    assert len(set(allocations)) == 8
    assert all(allocation in BUDGET for allocation in allocations)
    assert [t.user_attrs["label"].split()[0] for t in trials(url)] == ["named"] * 5 + ["search"] * 3
    assert {t.user_attrs["seed"] for t in trials(url)} == {0}


def test_the_end_of_a_trial_is_recorded_as_what_it_was(url: str) -> None:
    tune = searcher(url)
    for i in range(7):
        tune.suggest(f"t{i}")
        tune.on_trial_result(f"t{i}", result(1, 5.0 + i))
    tune.on_trial_result("t0", result(2, 2.5))
    tune.on_trial_complete("t0", result(2, 2.5, accuracy=0.5))  # it ended by itself
    tune.on_trial_complete("t1", result(2, 3.0))  # it was stopped at a result that is new
    tune.on_trial_result("t2", result(2, math.nan))
    tune.on_trial_complete("t2", result(2, math.nan))
    tune.on_trial_complete("t3", error=True)
    tune.on_trial_complete("t4")
    tune.on_trial_complete("t5", result(2, math.inf))  # stopped after it diverged
    states = [t.state.name for t in trials(url)]
    assert states == ["COMPLETE", "PRUNED", "FAIL", "FAIL", "FAIL", "FAIL", "RUNNING"]
    done = trials(url)
    assert done[0].value == 2.5
    assert done[0].user_attrs["accuracy"] == 0.5
    assert done[1].value == 3.0
    assert done[1].intermediate_values == {1: 6.0, 2: 3.0}
    assert done[2].intermediate_values == {1: 7.0}
    assert done[2].user_attrs["reason"] == "loss is nan, expected a finite number"
    assert done[3].user_attrs["reason"] == "the trial failed in Tune"


def test_a_stopped_trial_is_whole_if_it_reached_max_t(url: str) -> None:
    tune = searcher(url, max_t=3)
    for name, step in (("whole", 3), ("short", 2)):
        tune.suggest(name)
        tune.on_trial_complete(name, result(step, 1.0))
    assert [t.state.name for t in trials(url)[:2]] == ["COMPLETE", "PRUNED"]


def test_late_and_repeated_results_change_nothing(url: str) -> None:
    tune = searcher(url)
    tune.suggest("a")
    tune.on_trial_result("a", result(1, 2.0))
    tune.on_trial_result("a", result(1, 9.0))
    tune.on_trial_complete("a", result(1, 2.0))
    tune.on_trial_result("a", result(2, 7.0))
    tune.on_trial_complete("a", error=True)
    tune.on_trial_complete("unknown", result(1, 2.0))
    (done, *_) = trials(url)
    assert (done.state.name, done.value, done.intermediate_values) == ("COMPLETE", 2.0, {1: 2.0})


def test_warm_starts_are_queued_once_and_must_be_in_the_budget(url: str) -> None:
    mine = Allocation([1, 2, 3, 6])
    searcher(url, warm_start=[mine, mine])
    assert [t.system_attrs["fixed_params"] for t in trials(url)] == [to_params(mine)]
    searcher(url, warm_start=[mine]).suggest("a")
    searcher(url, warm_start=[mine])
    assert len([t for t in trials(url) if t.state.name == "WAITING"]) == 1
    with pytest.raises(ValueError, match="the warm start 1x4 is not in"):
        searcher(url, warm_start=[Allocation([1, 1, 1, 1])])


def test_a_new_searcher_starts_what_a_killed_one_left_running_again(url: str) -> None:
    killed = searcher(url, warm_start=())
    first = killed.suggest("a")
    killed.suggest("b")
    killed.on_trial_complete("b", result(1, 1.0))
    later = searcher(url, warm_start=())
    assert later.suggest("c") == first
    assert [t.state.name for t in trials(url)] == ["FAIL", "PRUNED", "RUNNING"]
    assert trials(url)[0].user_attrs["reason"] == "Tune was stopped"
    killed.on_trial_complete("a", result(1, 1.0))  # a report from beyond changes nothing
    assert trials(url)[0].state.name == "FAIL"


def test_a_restored_searcher_goes_on_from_the_study_alone(url: str, tmp_path: Path) -> None:
    before = searcher(url)
    frozen = pickle.dumps(before)  # as Tune does when the Tuner starts
    before.suggest("a")
    before.on_trial_result("a", result(1, 3.0))
    before.on_trial_result("a", result(2, 2.0))
    before.save(str(tmp_path / "state"))
    after: BudgetSearcher = pickle.loads(frozen)  # noqa: S301 - our own
    after.restore(str(tmp_path / "state"))
    after.on_trial_result("a", result(1, 3.1))  # it begins again
    after.on_trial_complete("a", result(2, 2.1))  # and is stopped at a step that it had passed
    assert trials(url)[0].state.name == "PRUNED"
    assert after.suggest("b") != before.suggest("c")
    in_memory = BudgetSearcher(optuna.create_study(), BUDGET, metric="loss", mode="min")
    with pytest.raises(ValueError, match="in memory"):
        in_memory.restore(str(tmp_path / "state"))


def test_the_budget_comes_to_an_end(url: str) -> None:
    tune = searcher(url, budget=ExpertBudget(2, 4, 1, 3))
    suggested = [tune.suggest(str(i)) for i in range(4)]
    assert suggested[3] == "FINISHED"
    assert {tuple(c["experts"]) for c in suggested[:3] if isinstance(c, dict)} == {
        (1, 3),
        (2, 2),
        (3, 1),
    }
    only = searcher(url.replace("study", "one"), budget=ExpertBudget(2, 4, 2, 2))
    assert only.suggest("a") == {"experts": [2, 2], "seed": 0}
    assert only.suggest("b") == "FINISHED"


def test_what_somebody_enqueued_outside_the_budget_is_failed_and_passed_over(url: str) -> None:
    tune = searcher(url, warm_start=())
    study = optuna.load_study(study_name="mine", storage=url)
    study.enqueue_trial(to_params(Allocation([1, 1, 1, 1])))
    study.enqueue_trial({"experts_00": 6, "experts_01": 6})
    config = tune.suggest("a")
    assert isinstance(config, dict)
    assert Allocation(config["experts"]) in BUDGET
    assert [t.state.name for t in trials(url)] == ["FAIL", "FAIL", "RUNNING"]


def test_another_direction_and_another_budget_are_refused(url: str) -> None:
    searcher(url)
    with pytest.raises(ValueError, match="mode='max', but the study 'mine' is to minimize"):
        searcher(url, mode="max")
    with pytest.raises(ValueError, match="mode must be 'min' or 'max', got 'lowest'"):
        searcher(url, mode="lowest")
    with pytest.raises(ValueError, match="say by storage where the study 'x' is"):
        BudgetSearcher("x", BUDGET, metric="loss", mode="min")


def test_a_study_of_the_search_command_keeps_its_rules(url: str) -> None:
    spec = SPEC
    budget = spec.budget
    sampler = BudgetSampler(budget, seed=0)
    study = open_study("mine", url, spec, sampler=sampler, pruner=optuna.pruners.NopPruner())
    with pytest.raises(ValueError, match="the study 'mine' is about"):
        BudgetSearcher(study, ExpertBudget(2, 4), metric="loss", mode="min")
    tune = BudgetSearcher(study, budget, metric="loss", mode="min", max_t=1)
    tune.suggest("a")
    tune.on_trial_complete("a", result(1, 1.0))
    tune.suggest("b")
    tune.on_trial_complete("b", result(1, 1.0, accuracy=0.5, standard_error=0.1))
    tune.suggest("c")
    first, second, third, *_ = records(study)
    assert (first.state, second.state, second.accuracy) == ("FAIL", "COMPLETE", 0.5)
    assert "has no accuracy" in first.reason
    assert {first.seed, second.seed} == {spec.seed}
    assert reconcile(study) == 1  # search.run starts the third again
    assert [r.allocation for r in records(study) if r.state == "WAITING"][-1] == third.allocation


def test_one_process_at_a_time_works_on_a_study(url: str, tmp_path: Path) -> None:
    ours = searcher(url)
    study, frozen = ours._study, pickle.dumps(ours)
    assert len(list(tmp_path.glob("study.db.*.lock"))) == 1
    copies = [copy.deepcopy(ours), pickle.loads(frozen)]  # noqa: S301 - our own
    del ours
    assert len(list(tmp_path.glob("study.db.*.lock"))) == 1
    copies.clear()
    gc.collect()
    assert list(tmp_path.glob("study.db.*.lock")) == []

    script = f"""
import optuna
from mola.allocation import ExpertBudget
from search.tune import BudgetSearcher
optuna.logging.set_verbosity(optuna.logging.WARNING)
tune = BudgetSearcher("mine", ExpertBudget(4, 12), metric="loss", mode="min", storage={url!r})
tune.suggest("a")
print("works", flush=True)
input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == b"works\n"
        said = f"^another search works on the study 'mine': process {other.pid} on "
        for begin in (
            lambda: searcher(url),
            lambda: pickle.loads(frozen),  # noqa: S301 - as Tuner.restore does
            lambda: claim(study, url).__enter__(),  # as search.run does
        ):
            with pytest.raises(ValueError, match=said) as caught:
                begin()
            assert len(str(caught.value).splitlines()) == 1
        other.kill()
    assert isinstance(searcher(url).suggest("b"), dict)  # the lock of a killed process is no more
    states = [trial.state.name for trial in trials(url)]
    assert (states[0], states.count("RUNNING")) == ("FAIL", 1)


def test_a_tuner_behind_a_ray_client_finds_the_study_free(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    here = searcher(url)
    gc.collect()
    assert here.metric == "loss"
    assert list(tmp_path.glob("study.db.*.lock")) == []


def test_a_study_that_others_cannot_reach_needs_no_claim() -> None:
    for storage in (None, "sqlite:///:memory:"):
        study = optuna.create_study(storage=storage)
        BudgetSearcher(study, BUDGET, metric="loss", mode="min").suggest("a")


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start Ray on one core, without its dashboard."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def make_trainable() -> Callable[[dict[str, Any]], None]:
    """Make a function that Ray sends to its workers whole, as they cannot import this file."""

    def train(config: dict[str, Any]) -> None:
        """Pretend: lower layers want experts; one allocation breaks and one diverges."""
        from ray import tune

        experts = config["experts"]
        value = 5 - sum(w * n for w, n in zip((4, 3, 2, 1), experts, strict=True)) / 20
        if experts == [3, 3, 3, 3]:
            raise RuntimeError("out of memory")
        for step in range(1, 5):
            diverged = experts == [1, 2, 4, 5] and step > 1
            tune.report({"loss": float("nan") if diverged else value + 1 / step})

    return train


@pytest.mark.timeout(180)  # starts Ray
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_real_tuner_with_asha_fills_a_study_that_can_be_continued(
    url: str, tmp_path: Path, local_ray: None
) -> None:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    train = make_trainable()
    tuner = tune.Tuner(
        train,
        tune_config=tune.TuneConfig(
            search_alg=searcher(url, max_t=4),
            scheduler=ASHAScheduler(metric="loss", mode="min", max_t=4, grace_period=1),
            num_samples=7,
            max_concurrent_trials=1,  # so that ASHA's decisions do not depend on timing
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(name="asha", storage_path=str(tmp_path), verbose=0),
    )
    tuner.fit()
    done = trials(url)
    states = {str(from_params(t.params)): t.state.name for t in done}
    assert len(done) == 7
    assert states["3x4"] == "FAIL"
    assert states["1 2 4 5"] == "FAIL"
    assert set(states.values()) == {"COMPLETE", "PRUNED", "FAIL"}
    for trial in done:
        if trial.state.name == "COMPLETE":
            assert max(trial.intermediate_values, default=0) <= 4
            assert trial.value == pytest.approx(
                5
                - sum(w * n for w, n in zip((4, 3, 2, 1), trial.params.values(), strict=True)) / 20
                + 1 / 4
            )
        if trial.state.name == "PRUNED":
            assert max(trial.intermediate_values) < 4
    # the Tuner can be restored, without repeating anything, and the study opened and continued
    tune.Tuner.restore(str(tmp_path / "asha"), trainable=train).fit()
    assert trials(url) == done
    study = optuna.load_study(study_name="mine", storage=url, sampler=BudgetSampler(BUDGET, seed=0))
    assert study.best_trial.state.name == "COMPLETE"
    from studies.encoding import distributions

    following = from_params(study.ask(dict(distributions(BUDGET))).params)
    assert following in BUDGET
    assert str(following) not in states
