"""Begin a search with what another one has found: which layers its experts were worth most in.

Of the other study a weight per layer is taken, and kept in the new one, so that nothing depends on
the other study afterwards. The weights make an allocation, which the new search tries and confirms
like any prior, and a direction that its sampler follows for as long as the trials agree
(`search.sampler.features`). They fit any depth and any total, because they are worth by relative
depth, and not counts.

Notation: L layers of the new search, S of the other one, V numbers of experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna

from mola.allocation import Allocation, ExpertBudget
from search.priors.given import Prior
from search.sampler.features import FeatureMap
from search.sampler.history import all_trials, read_history
from search.sampler.moves import Floats, best_additive
from search.sampler.surrogate import fit
from studies.records import get_priors, study_spec
from studies.store import load_study, storage_url
from studies.strict import decode

FEWEST = 6  # measured allocations of the other study, below which it says nothing


@dataclass(frozen=True)
class Source:
    """Another search, as far as a new one begins with it.

    Attributes:
        study: Its name.
        model: Its base model, for people.
        data: Its data set, for people.
        objective: Its objective's unit.
        total: Its experts over all layers.
        trials: Trials that its model rests on, repeats on further seeds included.
        worth: [S] by how much the objective falls in a layer per unit of log(1 + experts).
    """

    study: str
    model: str
    data: str
    objective: str
    total: int
    trials: int
    worth: tuple[float, ...]

    def __str__(self) -> str:
        """Name it for people."""
        return (
            f"{self.study} ({self.total} experts over {len(self.worth)} layers, {self.model}, "
            f"{self.data}, {self.trials} trials)"
        )


def read_sources(
    names: Sequence[str], own: str, root: Path, storage: str | None, objective: str
) -> tuple[Source, ...]:
    """Read the searches that a new one is to begin with.

    Args:
        names: of the other studies, in the same place.
        own: name of the new study; what it took from others before is not needed again.
        root: folder of the studies.
        storage: URL, if they are not in the default place.
        objective: unit of the new search's objective.

    Raises:
        ValueError: one is missing, has another objective or too few trials; one line.
    """
    found = []
    for name in dict.fromkeys(names):
        if name == own:
            raise ValueError(f"--warm-from {name}: a search cannot begin with itself")
        try:
            found.append(read_source(load_study(name, storage_url(root, name, storage)), objective))
        except ValueError as error:
            if name not in _known(own, storage_url(root, own, storage)):
                text = str(error)
                said = text if text.startswith("--") else f"--warm-from {name}: {text}"
                raise ValueError(said) from None
    return tuple(found)


def _known(name: str, url: str) -> set[str]:
    """Name the searches that a study has begun with; none if there is no such study yet."""
    try:
        return {prior.source.study for prior in recorded(load_study(name, url)) if prior.source}
    except ValueError:
        return set()


def read_source(study: optuna.Study, objective: str) -> Source:
    """Take from a study what another search can begin with.

    Args:
        study: finished or not; nothing is written to it.
        objective: unit of the new search's objective.

    Raises:
        ValueError: the study has another objective or too few trials, or was not made here.
    """
    spec, name = study_spec(study), study.study_name
    if spec.objective != objective:
        raise ValueError(
            f"--warm-from {name}: its objective is {spec.objective}, that of this search is "
            f"{objective}; what is worth an expert for one says little about the other"
        )
    worth, trials = learn_worth(study, spec.budget)
    if len(trials) < FEWEST:
        raise ValueError(
            f"--warm-from {name}: it has measured {len(trials)} allocations, and {FEWEST} are the "
            "fewest that say anything; let it run first"
        )
    return Source(
        name, spec.model_name, spec.data, spec.objective, spec.total, sum(trials.values()), worth
    )


def learn_worth(
    study: optuna.Study, budget: ExpertBudget
) -> tuple[tuple[float, ...], dict[Allocation, int]]:
    """Ask the sampler's model of a study what experts are worth in each layer.

    The model's mean of a layer's own share, [V], is fitted by a straight line over log(1 + n); the
    weight is how steeply it falls.

    Args:
        study: with its trials.
        budget: what it searches.

    Returns:
        A weight per layer, in the objective's unit; empty without a finished trial. And the number
        of trials of each measured allocation.
    """
    history = read_history(all_trials(study), budget, study.direction)
    trials = dict(Counter(history.measured.allocations))
    if not trials:
        return (), trials
    believed = [prior.belief for prior in recorded(study)]
    model = fit(FeatureMap(budget, believed), history.measured.observations)
    tables = model.tables()  # [S, V]
    levels = np.log1p(model.features.first + np.arange(tables.shape[1]))
    levels = levels - levels.mean()
    power = float(levels @ levels)
    slopes = tables @ levels / power if power > 0 else np.zeros(len(tables))
    return tuple((-slopes).tolist()), trials


def transfer(source: Source, budget: ExpertBudget) -> Prior:
    """Turn another search's weights into a prior of this one.

    The allocation is the one that the weights make best in this budget, exactly, with returns that
    diminish as log(1 + n): each expert goes where weight / (1 + n) is highest.
    """
    weights = over_depth(source.worth, budget.num_layers)
    first = min(budget.lows)
    levels = np.log1p(np.arange(first, max(budget.highs) + 1))
    counts = best_additive(-np.outer(weights, levels), budget, first)
    allocation = Allocation(counts.tolist())
    if not weights.any():  # nothing is known, and any allocation would be as good
        allocation = budget.project([budget.total / budget.num_layers] * budget.num_layers)
    return Prior(f"from {source.study}", allocation, tuple(weights.tolist()), source)


def over_depth(worth: Sequence[float], num_layers: int) -> Floats:
    """Spread weights over another number of layers, by relative depth.

    Each layer gets the mean of what lies in its share of the depth, [L]: the same weights for the
    same depth, the mean of two for half of it.
    """
    edges = np.arange(len(worth) + 1) / len(worth)
    until = np.interp(np.arange(num_layers + 1) / num_layers, edges, np.cumsum([0.0, *worth]))
    share: Floats = np.diff(until) * num_layers / len(worth)
    return share


def recorded(study: optuna.Study) -> list[Prior]:
    """Give the priors that a study took from others, as it recorded them.

    Raises:
        ValueError: they were recorded by another version.
    """
    return [
        Prior(
            name,
            Allocation(prior["experts"]),
            tuple(prior["scores"]),
            decode(prior["source"], Source, f"the study's prior {name!r}"),
        )
        for name, prior in get_priors(study).items()
        if prior.get("source") is not None
    ]
