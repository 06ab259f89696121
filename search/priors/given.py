"""Read the priors that people name with `--prior`: names, allocations, scores per layer."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mola.allocation import Allocation, ExpertBudget
from search.priors.measure import MEASURED
from search.priors.named import NAMES, named
from search.priors.scores import allocate
from studies.strict import check_keys

if TYPE_CHECKING:
    from search.priors.transfer import Source


@dataclass(frozen=True)
class Prior:
    """An allocation that somebody believes in.

    Attributes:
        name: As given: a name, or the name of a file.
        allocation: In the budget.
        scores: Per layer, where the allocation was made of them.
        source: The other search that they come from; None where people or a measurement gave them.
    """

    name: str
    allocation: Allocation
    scores: tuple[float, ...] | None = None
    source: Source | None = None

    @property
    def belief(self) -> Allocation | tuple[float, ...]:
        """What the sampler is told: another search's weights, else the allocation."""
        known = self.scores if self.source is not None else None
        return self.allocation if known is None else known


def read_priors(texts: Sequence[str], budget: ExpertBudget) -> tuple[Prior | str, ...]:
    """Read the values of `--prior`.

    A file holds an allocation (as `search.export` writes it, or a list of counts) or scores, as
    JSON `{"scores": [...]}`. An allocation that is not in the budget is brought into it as if its
    counts were scores, with a warning.

    Args:
        texts: names and files.
        budget: what is searched.

    Returns:
        The priors in the order given, each once; the name alone of one that is to be measured.

    Raises:
        ValueError: a name is unknown, or a file is wrong; one line.
    """
    found: dict[str, Prior | str] = {}
    for text in dict.fromkeys(texts):
        if text in MEASURED:
            prior: Prior | str = text
        elif text in NAMES:
            prior = Prior(text, named(text, budget))
        elif Path(text).is_file():
            prior = _read(Path(text), budget)
        else:
            known = ", ".join([*NAMES, *MEASURED])
            raise ValueError(f"--prior {text}: expected one of {known}, or a file")
        name = prior if isinstance(prior, str) else prior.name
        if name in found:
            raise ValueError(f"--prior {text}: another prior is called {name!r}; rename the file")
        found[name] = prior
    return tuple(found.values())


def from_scores(name: str, scores: Sequence[float], budget: ExpertBudget) -> Prior:
    """Make a prior of scores.

    Raises:
        ValueError: the scores are not one usable number per layer.
    """
    try:
        return Prior(name, allocate(scores, budget), tuple(float(s) for s in scores))
    except ValueError as error:
        raise ValueError(f"--prior {name}: {error}") from None


def _read(path: Path, budget: ExpertBudget) -> Prior:
    scores = _scores(path)
    if scores is not None:
        return from_scores(path.name, scores, budget)
    from studies.export import read_allocation_file  # takes longer than --help may

    try:
        allocation, _ = read_allocation_file(path)
    except ValueError as error:
        raise ValueError(f"--prior {error}") from None
    if allocation.num_layers != budget.num_layers:
        raise ValueError(
            f"--prior {path}: the allocation has {allocation.num_layers} layers, the model has "
            f"{budget.num_layers}"
        )
    if allocation in budget:
        return Prior(path.name, allocation)
    if allocation.total == 0:
        raise ValueError(f"--prior {path}: the allocation has no expert at all")
    scaled = allocate(allocation.experts, budget)
    warnings.warn(
        f"--prior {path}: {allocation} ({allocation.total} experts) is not in the budget; "
        f"in proportion to it: {scaled}",
        stacklevel=4,
    )
    return Prior(path.name, scaled)


def _scores(path: Path) -> list[Any] | None:
    """Read a file of scores; None if it is another kind of file, whose own reader says what."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or "scores" not in document:
        return None
    try:
        check_keys(document, ["scores"], "the file of scores")
    except ValueError as error:
        raise ValueError(f"--prior {path}: {error}") from None
    if not isinstance(document["scores"], list):
        raise ValueError(f"--prior {path}: scores must be a list of numbers, one per layer")
    scores: list[Any] = document["scores"]
    return scores
