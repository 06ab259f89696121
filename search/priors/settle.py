"""Measure the priors of a study that need it, once, and record them all in the study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import optuna

from search.priors.given import Prior, from_scores
from search.priors.measure import Request, measure, rows_of
from studies.records import get_priors
from studies.store import set_priors

if TYPE_CHECKING:
    from mola.data import TaskData
    from studies.spec import StudySpec


def settle(
    study: optuna.Study,
    spec: StudySpec,
    data: TaskData,
    priors: Sequence[Prior | str],
    *,
    device: str,
    quiet: bool,
) -> tuple[Prior, ...]:
    """Turn the priors of this run into allocations, and add them to the study's record.

    What was measured before is taken from the study: model, data and adapter are part of what
    makes it the same study, so that a second measurement would find the same.

    Args:
        study: open for writing.
        spec: what it is about.
        data: the tokenised rows.
        priors: see `read_priors`.
        device: of the measurement, see `Request`.
        quiet: without progress on stderr.

    Raises:
        ValueError: a prior cannot be measured; one line.
    """
    recorded = get_priors(study)
    settled = []
    for prior in priors:
        if isinstance(prior, str):
            scores = recorded.get(prior, {}).get("scores")
            if scores is None:
                request = Request(
                    prior,
                    spec.model,
                    device,
                    spec.adapter,
                    spec.train,
                    spec.seed,
                    rows_of(prior, data, spec.train, spec.seed),
                )
                scores = measure(request, quiet=quiet)
            prior = from_scores(prior, scores, spec.budget)
        settled.append(prior)
    ours = {p.name: {"experts": p.allocation.experts, "scores": p.scores} for p in settled}
    if ours:
        set_priors(study, recorded | ours)
    return tuple(settled)
