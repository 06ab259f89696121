"""Samplers over a budget: what Optuna expects, what the budget demands, and that they learn.

The contracts run on every sampler that `--sampler` offers and whose packages are installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from mola.allocation import Allocation, ExpertBudget
from search.sampler import (
    SAMPLERS,
    BudgetExhausted,
    BudgetSampler,
    make_sampler,
    posterior_means,
    remaining,
)
from studies.encoding import distributions, from_params, to_params

BUDGET = ExpertBudget(6, 18, 1, 6)
MADE_HERE = ("budget", "tpe", "random")  # the others need packages that the project does not


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


@pytest.fixture(params=MADE_HERE)
def make(request: pytest.FixtureRequest) -> Callable[..., optuna.samplers.BaseSampler]:
    """Make one of the samplers."""
    return lambda budget=BUDGET, seed=0: make_sampler(request.param, budget, seed)


def ask(study: optuna.Study, budget: ExpertBudget = BUDGET) -> tuple[optuna.Trial, Allocation]:
    trial = study.ask(dict(distributions(budget)))
    return trial, from_params(trial.params)


def slope(allocation: Allocation) -> float:
    """An objective with its best allocation at the top end of the depth."""
    weights = np.arange(1, allocation.num_layers + 1)
    return -float(weights @ np.log1p(allocation.experts))


def searched(study: optuna.Study, trials: int, budget: ExpertBudget = BUDGET) -> list[Allocation]:
    proposals = []
    for _ in range(trials):
        trial, allocation = ask(study, budget)
        study.tell(trial, slope(allocation))
        proposals.append(allocation)
    return proposals


def finished(
    allocation: Allocation,
    value: float,
    *,
    budget: ExpertBudget = BUDGET,
    state: TrialState = TrialState.COMPLETE,
    **extra: Any,
) -> optuna.trial.FrozenTrial:
    return create_trial(
        state=state,
        value=value if state == TrialState.COMPLETE else None,
        params=to_params(allocation),
        distributions=dict(distributions(budget)),
        **extra,
    )


def test_every_proposal_is_a_free_member_in_any_state_of_the_study(make: Any) -> None:
    rng = np.random.default_rng(0)
    study = optuna.create_study(sampler=make())
    seen: set[Allocation] = set()
    for i in range(40):
        trial, allocation = ask(study)
        assert allocation in BUDGET
        assert allocation not in seen
        assert all(type(n) is int for n in trial.params.values())
        seen.add(allocation)
        kind = rng.integers(4) if i > 4 else 0  # some stay running
        if kind in (0, 1):
            study.tell(trial, slope(allocation) + rng.normal())
        elif kind == 2:
            trial.report(slope(allocation), 1)
            study.tell(trial, state=TrialState.PRUNED if i % 2 else TrialState.FAIL)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_small_budget_is_tried_once_through(data: st.DataObject, make: Any) -> None:
    layers = data.draw(st.integers(1, 4))
    lows = data.draw(st.lists(st.integers(0, 2), min_size=layers, max_size=layers))
    highs = [low + data.draw(st.integers(0, 2)) for low in lows]
    budget = ExpertBudget(layers, data.draw(st.integers(sum(lows), sum(highs))), lows, highs)
    study = optuna.create_study(sampler=make(budget, 1))
    found = searched(study, budget.size(), budget)
    assert sorted(found) == [budget.member(rank) for rank in range(budget.size())]
    assert remaining(study, budget) == 0
    with pytest.raises(BudgetExhausted, match="of the budget have been tried") as error:
        ask(study, budget)
    assert error.value.trial_number == budget.size()


def test_optimize_stops_when_the_budget_is_exhausted(make: Any) -> None:
    budget = ExpertBudget(3, 5, 1, 2)  # three members
    study = optuna.create_study(sampler=make(budget, 0))

    def objective(trial: optuna.Trial) -> float:
        for name, d in distributions(budget).items():
            trial.suggest_int(name, d.low, d.high)
        return slope(from_params(trial.params))

    study.optimize(objective, n_trials=10)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 3


def test_a_budget_without_a_choice_allows_enqueued_replicates(make: Any) -> None:
    budget = ExpertBudget(3, 6, 2, 2)
    study = optuna.create_study(sampler=make(budget, 0))
    searched(study, 1, budget)
    study.enqueue_trial(to_params(budget.member(0)), user_attrs={"label": "replicate", "seed": 1})
    searched(study, 1, budget)
    with pytest.raises(BudgetExhausted, match="the only allocation of the budget"):
        ask(study, budget)


def test_waiting_allocations_are_not_proposed(make: Any) -> None:
    budget = ExpertBudget(3, 5, 1, 2)
    study = optuna.create_study(sampler=make(budget, 0))
    ask(study, budget)
    enqueued = next(
        a for a in map(budget.member, range(3)) if a != from_params(study.trials[0].params)
    )
    study.enqueue_trial(to_params(enqueued))
    number = study._storage.create_new_trial(study._study_id)  # asks beside the queue
    space = study.sampler.infer_relative_search_space(study, study.trials[-1])
    frozen = study._storage.get_trial(number)
    proposed = from_params(study.sampler.sample_relative(study, frozen, space))
    assert proposed not in (enqueued, from_params(study.trials[0].params))


def test_an_allocation_in_the_queue_is_run_as_it_is(make: Any) -> None:
    study = optuna.create_study(sampler=make())
    study.enqueue_trial(to_params(Allocation([6, 6, 3, 1, 1, 1])))
    assert ask(study)[1] == Allocation([6, 6, 3, 1, 1, 1])


def test_a_partly_fixed_trial_is_filled_up_within_the_budget(make: Any) -> None:
    study = optuna.create_study(sampler=make())
    searched(study, 12)
    study.enqueue_trial({"experts_00": 6, "experts_03": 1})
    allocation = ask(study)[1]
    assert allocation in BUDGET
    assert (allocation.experts[0], allocation.experts[3]) == (6, 1)
    study.enqueue_trial({"experts_00": 6, "experts_01": 6, "experts_02": 6})
    with pytest.raises(ValueError, match="out of reach"):
        ask(study)


def test_layers_without_a_choice_keep_their_count(make: Any) -> None:
    budget = ExpertBudget(6, 20, [1, 3, 0, 1, 2, 0], [4, 3, 5, 1, 6, 6])
    study = optuna.create_study(sampler=make(budget, 0))
    for allocation in searched(study, 20, budget):
        assert allocation in budget
        assert (allocation.experts[1], allocation.experts[3]) == (3, 1)


def test_the_search_space_is_complete_from_the_first_trial(make: Any) -> None:
    study = optuna.create_study(sampler=make())
    trial = study.ask()
    assert trial.params == {}
    frozen = study._storage.get_trial(trial._trial_id)
    assert study.sampler.infer_relative_search_space(study, frozen) == distributions(BUDGET)


def test_a_layer_by_itself_is_refused(make: Any) -> None:
    study = optuna.create_study(sampler=make())
    frozen = study._storage.get_trial(study.ask()._trial_id)
    with pytest.raises(ValueError, match="cannot be drawn by itself without breaking the total"):
        study.sampler.sample_independent(study, frozen, "experts_00", IntDistribution(1, 6))
    with pytest.raises(ValueError, match="experts_00 to experts_05 alone, not 'lr'"):
        study.sampler.sample_independent(study, frozen, "lr", FloatDistribution(0, 1))
    with pytest.raises(ValueError, match="suggest it with IntDistribution"):
        study.ask({"experts_00": IntDistribution(90, 99)})


def test_a_search_space_with_holes_is_refused(make: Any) -> None:
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        partial = optuna.samplers.PartialFixedSampler({"experts_00": 2}, make())
    study = optuna.create_study(sampler=partial)
    with pytest.raises(ValueError, match="fix a layer by equal lower and upper bounds"):
        ask(study)


def test_several_objectives_are_refused(make: Any) -> None:
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=make())
    with pytest.raises(ValueError, match="multi-objective"):
        ask(study)


def test_threads_never_propose_the_same(make: Any) -> None:
    study = optuna.create_study(sampler=make())

    def objective(trial: optuna.Trial) -> float:
        for name, d in distributions(BUDGET).items():
            trial.suggest_int(name, d.low, d.high)
        return slope(from_params(trial.params))

    study.optimize(objective, n_trials=24, n_jobs=4)
    proposals = [from_params(t.params) for t in study.trials]
    assert len(set(proposals)) == 24
    assert all(allocation in BUDGET for allocation in proposals)


def test_names_offered_are_known_and_others_refused() -> None:
    assert set(MADE_HERE) < set(SAMPLERS)
    with pytest.raises(ValueError, match="unknown sampler 'grid'; expected one of budget, tpe"):
        make_sampler("grid", BUDGET, 0)


@pytest.mark.parametrize(("name", "package"), [("gp", "scipy"), ("cmaes", "cmaes")])
def test_a_sampler_without_its_package_says_which(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=f"needs the package {package}; pip install {package}"):
        make_sampler(name, BUDGET, 0)


def test_a_sampler_built_anew_goes_on_as_before() -> None:
    whole = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=3))
    expected = searched(whole, 16)
    resumed = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=3))
    found = []
    for _ in range(16):
        resumed.sampler = BudgetSampler(BUDGET, seed=3)
        found += searched(resumed, 1)
    assert found == expected


def test_several_processes_that_ask_of_one_study_propose_different_allocations(
    tmp_path: Any,
) -> None:
    """Each with a sampler and a storage of its own, with the same seed, in turns."""
    budget = ExpertBudget(8, 32)
    url = f"sqlite:///{tmp_path}/study.db"
    optuna.create_study(storage=url, study_name="s")
    found = []
    for _ in range(6):
        for _ in range(2):
            sampler = BudgetSampler(budget, seed=0)
            study = optuna.load_study(storage=url, study_name="s", sampler=sampler)
            trial, allocation = ask(study, budget)
            found.append(allocation)
        study.tell(trial, slope(allocation))
    assert len(set(found)) == 12


def test_another_seed_gives_other_proposals() -> None:
    budget = ExpertBudget(12, 60)
    studies = [optuna.create_study(sampler=BudgetSampler(budget, seed=seed)) for seed in (1, 2)]
    assert searched(studies[0], 8, budget) != searched(studies[1], 8, budget)


def test_no_seed_and_reseeding_mean_a_fresh_one() -> None:
    """Uniform draws, of which eight agree by chance once in more than 1e60 runs."""
    budget = ExpertBudget(12, 60)
    assert budget.size() > 10**8
    studies = [
        optuna.create_study(sampler=make_sampler("random", budget, seed))
        for seed in (None, None, 1, 1)
    ]
    studies[3].sampler.reseed_rng()
    runs = {tuple(searched(study, 8, budget)) for study in studies}
    assert len(runs) == 4


def test_eight_proposals_without_a_result_are_different_and_not_alike() -> None:
    budget = ExpertBudget(32, 160)
    study = optuna.create_study(sampler=BudgetSampler(budget, seed=0))
    searched(study, 8, budget)
    batch = [np.array(ask(study, budget)[1].experts) for _ in range(8)]
    distances = [np.abs(a - b).sum() for i, a in enumerate(batch) for b in batch[:i]]
    assert min(distances) > 0
    assert np.median(distances) > 20  # experts moved twice over: not one idea eight times


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_best_allocation_is_found_in_either_direction(direction: Any) -> None:
    sign = 1.0 if direction == "minimize" else -1.0
    study = optuna.create_study(direction=direction, sampler=BudgetSampler(BUDGET, seed=0))
    for _ in range(24):
        trial, allocation = ask(study)
        study.tell(trial, sign * slope(allocation))
    values = sorted(slope(BUDGET.member(rank)) for rank in range(BUDGET.size()))
    assert sign * study.best_value <= values[1]  # of some two thousand


def test_seed_replicates_are_repeated_measurements_at_another_level() -> None:
    """A further seed shifts all its trials alike; the shift must not count against them."""
    rng = np.random.default_rng(0)
    study = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=0))
    good, bad = Allocation([1, 1, 1, 3, 6, 6]), Allocation([6, 6, 3, 1, 1, 1])
    for allocation in (good, bad, *(BUDGET.uniform(rng) for _ in range(10))):
        study.add_trial(finished(allocation, slope(allocation), user_attrs={"seed": 0}))
    for allocation in (good, bad):
        attrs = {"seed": 1, "label": "replicate"}
        study.add_trial(finished(allocation, slope(allocation) + 50, user_attrs=attrs))
    means = posterior_means(study, BUDGET)
    assert means[good] == pytest.approx(slope(good), abs=2.0)
    assert means[good] < means[bad]
    assert ask(study)[1] in BUDGET


def test_posterior_means_take_the_noise_out() -> None:
    rng = np.random.default_rng(1)
    study = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=0))
    allocations = list({BUDGET.uniform(rng) for _ in range(60)})
    noise = rng.normal(size=len(allocations))
    for allocation, error in zip(allocations, noise, strict=True):
        study.add_trial(finished(allocation, slope(allocation) + error))
    means = posterior_means(study, BUDGET)
    errors = [means[a] - slope(a) for a in allocations]
    assert np.std(errors) < 0.7 * np.std(noise)
    assert posterior_means(optuna.create_study(), BUDGET) == {}


def test_posterior_means_rest_on_the_trials_that_are_given_and_follow_the_direction() -> None:
    rng = np.random.default_rng(2)
    allocations = [BUDGET.uniform(rng) for _ in range(30)]
    low, high = (optuna.create_study(direction=d) for d in ("minimize", "maximize"))
    for allocation in allocations:
        low.add_trial(finished(allocation, slope(allocation)))
        high.add_trial(finished(allocation, -slope(allocation)))
    means, mirrored = posterior_means(low, BUDGET), posterior_means(high, BUDGET)
    assert mirrored == pytest.approx({a: -mean for a, mean in means.items()})
    few = posterior_means(low, BUDGET, low.get_trials(deepcopy=False)[:5])
    assert set(few) == set(allocations[:5])


def test_pruned_trials_count_by_their_last_rung() -> None:
    study = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=0))
    rng = np.random.default_rng(0)
    for allocation in {BUDGET.uniform(rng) for _ in range(12)}:
        value = slope(allocation)
        study.add_trial(finished(allocation, value, intermediate_values={5: value + 3}))
    bad = Allocation([6, 6, 3, 1, 1, 1])
    study.add_trial(
        finished(bad, 0, state=TrialState.PRUNED, intermediate_values={5: slope(bad) + 3})
    )
    assert posterior_means(study, BUDGET)[bad] == pytest.approx(slope(bad), abs=1.0)


def test_values_that_are_not_finite_and_trials_of_other_spaces_are_survived() -> None:
    study = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=0))
    rng = np.random.default_rng(0)
    for value in (math.inf, -math.inf, 1e300, 5.0, 5.0, 5.0):
        study.add_trial(finished(BUDGET.uniform(rng), value))
    study.add_trial(
        finished(BUDGET.uniform(rng), 0, state=TrialState.PRUNED, intermediate_values={1: math.nan})
    )
    study.add_trial(create_trial(value=1.0))
    study.add_trial(
        create_trial(value=1.0, params={"x": 1.0}, distributions={"x": FloatDistribution(0, 2)})
    )
    study.add_trial(finished(Allocation([1] * 6), 1.0))  # not the budget's total
    assert all(allocation in BUDGET for allocation in searched(study, 4))
    assert Allocation([1] * 6) not in posterior_means(study, BUDGET)


def test_equal_values_leave_proposals_possible() -> None:
    study = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=0))
    for _ in range(12):
        study.tell(ask(study)[0], 1.0)
    assert len(study.trials) == 12


def test_a_region_that_fails_is_left_alone() -> None:
    """As where a worker's memory is exhausted by a layer of eight experts, wherever it is."""
    budget = ExpertBudget(12, 48, 1, 8)
    study = optuna.create_study(sampler=BudgetSampler(budget, seed=0))
    failed = []
    for _ in range(40):
        trial, allocation = ask(study, budget)
        failed.append(max(allocation.experts) >= 8)
        study.tell(trial, *([None, TrialState.FAIL] if failed[-1] else [slope(allocation)]))
    assert sum(failed[:10]) >= 3
    assert sum(failed[10:]) == 0


def test_failures_by_chance_do_not_narrow_the_search() -> None:
    budget = ExpertBudget(12, 48, 1, 8)
    study = optuna.create_study(sampler=BudgetSampler(budget, seed=0))
    found = []
    for i in range(40):
        trial, allocation = ask(study, budget)
        study.tell(trial, *([None, TrialState.FAIL] if i % 7 == 6 else [slope(allocation)]))
        found.append(allocation.experts)
    assert np.array(found)[-8:].max() == 8


def test_a_search_goes_on_in_a_region_that_fails_when_nothing_else_is_left() -> None:
    budget = ExpertBudget(3, 6, 1, 3)
    study = optuna.create_study(sampler=BudgetSampler(budget, seed=0))
    found = []
    for _ in range(budget.size()):
        trial, allocation = ask(study, budget)
        found.append(allocation)
        bad = max(allocation.experts) == 3
        study.tell(trial, *([None, TrialState.FAIL] if bad else [slope(allocation)]))
    assert sorted(found) == [budget.member(rank) for rank in range(budget.size())]


def test_priors_turn_the_search_and_must_have_the_budgets_depth() -> None:
    budget = ExpertBudget(24, 96, 1, 8)
    weights = np.random.default_rng(0).permutation(np.linspace(0.2, 2, 24))
    prior = budget.project(4 + 3 * (weights - weights.mean()))

    def regret(priors: list[Allocation]) -> float:
        study = optuna.create_study(sampler=make_sampler("budget", budget, 0, priors))
        study.enqueue_trial(to_params(budget.project([4] * 24)))
        study.enqueue_trial(to_params(prior))
        values = []
        for _ in range(18):
            trial, allocation = ask(study, budget)
            values.append(-float(weights @ np.log1p(allocation.experts)))
            study.tell(trial, values[-1])
        return min(values)

    assert regret([prior]) < regret([])
    with pytest.raises(ValueError, match="the prior 1x3 has 3 layers, expected 24"):
        BudgetSampler(budget, priors=[Allocation([1, 1, 1])])
    with pytest.raises(ValueError, match="has 2 layers, expected 24"):
        BudgetSampler(budget, priors=[(0.5, 1.5)])
    BudgetSampler(budget, priors=[tuple(weights)])


def test_a_diverged_trial_does_not_drown_the_others() -> None:
    study = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=0))
    rng = np.random.default_rng(0)
    allocations = list({BUDGET.uniform(rng) for _ in range(40)})
    for allocation in allocations[:-1]:
        study.add_trial(finished(allocation, slope(allocation)))
    study.add_trial(finished(allocations[-1], 1e6))
    means = posterior_means(study, BUDGET)
    ranks = [sorted(means.values()).index(means[a]) for a in allocations[:-1]]
    truth = np.argsort(np.argsort([slope(a) for a in allocations[:-1]]))
    assert np.corrcoef(ranks, truth)[0, 1] > 0.8


def test_a_study_in_a_database_is_searched_and_resumed(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    budget = ExpertBudget(126, 630)
    study = optuna.create_study(storage=url, study_name="s", sampler=BudgetSampler(budget, seed=0))
    found = searched(study, 4, budget)
    again = optuna.load_study(storage=url, study_name="s", sampler=BudgetSampler(budget, seed=0))
    found += searched(again, 1, budget)
    assert len(set(found)) == 5
    assert all(allocation in budget for allocation in found)


def test_deep_models_with_large_budgets_are_searched() -> None:
    budget = ExpertBudget(126, 630)
    study = optuna.create_study(sampler=BudgetSampler(budget, seed=0))
    assert all(allocation in budget for allocation in searched(study, 6, budget))
