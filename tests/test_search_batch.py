"""Many workers with short trials get several proposals from one model, others do not."""

from __future__ import annotations

import math
import threading

import numpy as np
import optuna
import pytest

from mola.allocation import Allocation, ExpertBudget
from search.sampler import BudgetSampler, batch, budget
from search.sampler.batch import Batches, Learnt, _spread, results_per_model
from search.sampler.evidence import learn
from search.sampler.features import FeatureMap
from search.sampler.history import History, read_history
from studies.encoding import distributions, from_params, to_params

BUDGET = ExpertBudget(10, 40, 1, 8)
SPACE = dict(distributions(BUDGET))


def ask(study: optuna.Study) -> optuna.Trial:
    return study.ask(SPACE)  # type: ignore[arg-type]


def tell(study: optuna.Study, trial: optuna.Trial) -> None:
    experts = from_params(trial.params).experts
    study.tell(trial, -sum(math.log1p(n) / (1 + layer) for layer, n in enumerate(experts)))


def searching(
    workers: int, monkeypatch: pytest.MonkeyPatch, asks: int = 20
) -> tuple[list[Allocation], list[int]]:
    """Keep so many trials running; give the last proposals, and a 1 for each batch and an 0 for
    each model for one proposal among the same asks."""
    study = optuna.create_study(sampler=BudgetSampler(BUDGET, seed=0))
    rng = np.random.default_rng(0)
    for _ in range(60):
        study.enqueue_trial(dict(zip(SPACE, BUDGET.uniform(rng).experts, strict=True)))
    running = [ask(study) for _ in range(workers)]
    while study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,)):
        tell(study, running.pop(0))
        running.append(ask(study))
    made: list[int] = []
    whole, single = batch.Batch.__init__, budget.propose

    def make(self: batch.Batch, *args: object) -> None:
        made.append(1)
        whole(self, *args)  # type: ignore[arg-type]

    def propose(*args: object) -> Allocation:
        made.append(0)
        return single(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(batch.Batch, "__init__", make)
    monkeypatch.setattr(budget, "propose", propose)
    asked = []
    for _ in range(asks):
        tell(study, running.pop(0))
        running.append(ask(study))
        asked.append(from_params(running[-1].params))
    batch._MODELS.submit(int).result()  # after the model that is being made
    others = {from_params(t.params) for t in study.get_trials(deepcopy=False)[:-asks]}
    assert not others & set(asked)
    return asked, made


def test_many_workers_share_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, made = searching(20, monkeypatch)
    assert made == [1, 1]  # the one that serves, and the next
    assert len(set(asked)) == 20
    assert all(allocation in BUDGET for allocation in asked)


def test_the_same_results_give_the_same_proposals_however_long_a_model_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once, _ = searching(20, monkeypatch, asks=45)
    inside = batch.Batch.__init__

    def slowly(self: batch.Batch, *args: object) -> None:
        inside(self, *args)  # type: ignore[arg-type]
        waited.wait(0.05)

    waited = threading.Event()
    monkeypatch.setattr(batch.Batch, "__init__", slowly)
    assert searching(20, monkeypatch, asks=45)[0] == at_once


def test_the_next_model_knows_the_results_that_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[int] = []
    inside = batch.Batch.__init__

    def note(self: batch.Batch, among: object, features: object, history: History, *rest: object):  # type: ignore[no-untyped-def]
        known.append(len(history.full))
        inside(self, among, features, history, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(batch.Batch, "__init__", note)
    searching(20, monkeypatch, asks=64)
    assert known == [41, 55, 82, 102]


def test_few_workers_get_a_model_for_each_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, made = searching(4, monkeypatch)
    assert made == [0] * 20
    assert len(set(asked)) == 20


def test_a_model_is_shared_by_no_more_results_than_come_in_a_second() -> None:
    assert results_per_model(8, 0.1, 1000) == 1
    assert results_per_model(64, 1.0, 1000) == 64
    assert results_per_model(64, 0.1, 1000) == 64
    assert results_per_model(64, 16.0, 1000) == 4
    assert results_per_model(64, 600.0, 1000) == 1
    assert results_per_model(64, math.inf, 1000) == 1


def test_the_first_models_are_shared_by_few() -> None:
    assert [results_per_model(64, 1.0, known) for known in (0, 2, 3, 20, 100)] == [1, 1, 1, 5, 25]


def test_contrasts_that_tell_the_same_come_last() -> None:
    best = np.array([4, 4, 4, 4])
    ranked = np.array([[8, 8, 1, 1], [1, 1, 8, 8], [7, 7, 1, 1], [8, 1, 8, 1]])
    assert _spread(ranked, best).tolist() == [
        [8, 8, 1, 1],
        [8, 1, 8, 1],
        [1, 1, 8, 8],
        [7, 7, 1, 1],
    ]
    near = np.array([[5, 5, 3, 3], [5, 5, 4, 3], [5, 3, 5, 3]])  # a cosine of .84: not alike
    assert _spread(near, best).tolist() == near.tolist()


def finished_study(count: int) -> History:
    """Give the history of so many finished trials."""
    study = optuna.create_study()
    rng = np.random.default_rng(1)
    for allocation in {BUDGET.uniform(rng) for _ in range(2 * count)}:
        if len(study.get_trials(deepcopy=False)) < count:
            value = -math.log1p(allocation.experts[0])
            params = to_params(allocation)
            study.add_trial(
                optuna.create_trial(params=params, distributions=SPACE, value=value)  # type: ignore[arg-type]
            )
    return read_history(study.get_trials(deepcopy=False), BUDGET, study.direction)


@pytest.mark.parametrize(
    ("learnt_after", "kept"), [(100, True), (91, True), (89, False), (101, False)]
)
def test_variances_are_kept_until_the_history_has_grown_by_a_tenth(
    learnt_after: int, kept: bool
) -> None:
    history, features = finished_study(100), FeatureMap(BUDGET)
    before = Learnt(learn(features, history.measured.observations), learnt_after)
    made = batch.Batch(BUDGET, features, history, np.random.default_rng(0), before)
    assert (made.learnt is before) == kept
    assert made.learnt.finished == (learnt_after if kept else 100)


def test_proposals_go_on_when_all_ranked_ones_are_taken() -> None:
    history, rng = finished_study(40), np.random.default_rng(0)
    made = batch.Batch(BUDGET, FeatureMap(BUDGET), history, rng, None)
    ranked = {Allocation(row) for rows in made._ranked.values() for row in rows}
    taken = history.taken | ranked
    assert made.next(taken, rng) not in taken
    assert not made.serves(BUDGET)


def test_another_part_of_the_budget_gets_a_batch_of_its_own() -> None:
    history, rng = finished_study(40), np.random.default_rng(0)
    batches = Batches(FeatureMap(BUDGET))
    part = ExpertBudget(10, 40, 1, [2, *[8] * 9])
    proposed = [batches.next(among, history, 10, rng) for among in (BUDGET, part, BUDGET, part)]
    assert proposed[1] in part
    assert proposed[3] in part
    assert max(proposed[0].experts[0], proposed[2].experts[0]) > 2
