"""The sampler that searches allocations, and the choice of samplers by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np
import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial

from mola.allocation import Allocation, ExpertBudget
from search.sampler.batch import Batches, results_per_model
from search.sampler.cma import CmaEsSampler
from search.sampler.failures import without_failures
from search.sampler.features import Belief, FeatureMap
from search.sampler.history import History, all_in, all_trials, read_history
from search.sampler.joint import BudgetExhausted, JointSampler, remaining
from search.sampler.projected import ProjectedSampler, UniformSampler
from search.sampler.proposal import propose
from search.sampler.surrogate import fit

__all__ = [
    "SAMPLERS",
    "BudgetExhausted",
    "BudgetSampler",
    "make_sampler",
    "posterior_means",
    "remaining",
]

SAMPLERS = ("budget", "tpe", "gp", "cmaes", "random")
_NEEDS = {"gp": "scipy", "cmaes": "cmaes"}  # packages that Optuna leaves to its users


class BudgetSampler(JointSampler):
    """Search a budget for its best allocation in tens of noisy trials.

    Proposals come from a Gaussian process that knows what layers and experts are: diminishing
    returns, depth, interactions, noise and seeds, each to the degree that the study's trials show
    (surrogate.py, proposal.py). Pruned trials count by what their last rung predicts,
    running and waiting ones as results that will come. Trials that share an allocation but not the
    user attribute `seed` are repeated measurements. Numbers of experts from which on trials fail
    are left alone (failures.py). Where trials are so short and workers so many that they would wait
    for proposals, these come in batches (batch.py).

    Args:
        budget: the allowed allocations.
        seed: of the random part of proposals; None draws one.
        priors: allocations believed good, or a weight per layer. They suggest which layers matter,
            for as long as the trials agree; to have allocations tried, enqueue them.

    Raises:
        ValueError: a prior has another number of layers than the budget.
    """

    def __init__(
        self,
        budget: ExpertBudget,
        *,
        seed: int | None = None,
        priors: Sequence[Belief] = (),
    ) -> None:
        super().__init__(budget, seed=seed)
        for prior in priors:
            layers = len(prior.experts if isinstance(prior, Allocation) else prior)
            if layers != budget.num_layers:
                raise ValueError(
                    f"the prior {prior} has {layers} layers, expected {budget.num_layers}"
                )
        self._features = FeatureMap(budget, priors)
        self._batches: Batches | None = None

    def propose(
        self,
        study: Study,
        trial: FrozenTrial,
        history: History,
        among: ExpertBudget,
        rng: np.random.Generator,
    ) -> Allocation:
        """Propose by the model."""
        works = among
        if len(history.failed):
            works = without_failures(among, history.failed, history.measured.observations.counts)
            works = among if all_in(history.taken, works) else works
        waiting, taken = history.pending, history.taken
        share = results_per_model(len(waiting) + 1, history.seconds, len(history.full))
        if share == 1:
            self._batches = None
            observations = history.measured.observations
            return propose(works, self._features, observations, waiting, taken, rng)
        if self._batches is None:
            self._batches = Batches(self._features)
        return self._batches.next(works, history, share, rng)


def posterior_means(
    study: Study, budget: ExpertBudget, trials: Sequence[FrozenTrial] | None = None
) -> dict[Allocation, float]:
    """Estimate the objective of every measured allocation with the noise taken out.

    Args:
        study: whose direction counts.
        budget: of the allocations.
        trials: what the estimates rest on; None is all of the study's.

    Returns:
        The model's mean per allocation, in the study's units and at the level of the commonest
        seed; empty without a finished trial.
    """
    trials = all_trials(study) if trials is None else trials
    history = read_history(trials, budget, study.direction)
    if not history.measured.allocations:
        return {}
    model = fit(FeatureMap(budget), history.measured.observations)
    sign = -1.0 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1.0
    means = sign * model.mean(history.measured.observations.counts)
    return {a: float(mean) for a, mean in zip(history.measured.allocations, means, strict=True)}


def make_sampler(
    name: str, budget: ExpertBudget, seed: int | None, priors: Sequence[Belief] = ()
) -> JointSampler:
    """Make a sampler by its name on the command line.

    Args:
        name: one of SAMPLERS: `budget`, a stock Optuna sampler projected onto the budget, or
            `random`, uniform over the budget.
        budget: the allowed allocations.
        seed: of the sampler; None draws one.
        priors: what is believed, for `budget`; the others do not take any.

    Raises:
        ValueError: the name is unknown, or the sampler needs a package that is not installed.
    """
    if name == "budget":
        return BudgetSampler(budget, seed=seed, priors=priors)
    if name == "random":
        return UniformSampler(budget, seed=seed)
    if name not in SAMPLERS:
        raise ValueError(f"unknown sampler {name!r}; expected one of {', '.join(SAMPLERS)}")
    package = _NEEDS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"the sampler {name!r} needs the package {package}; pip install {package}, or choose "
            "another sampler"
        )
    base = {
        "tpe": optuna.samplers.TPESampler,
        "gp": optuna.samplers.GPSampler,
        "cmaes": CmaEsSampler,
    }[name](seed=seed)
    return ProjectedSampler(base, budget, seed=seed)
