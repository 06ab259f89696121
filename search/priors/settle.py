"""Measure the priors of a study that need it, once, and record them all in the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import optuna

from search.priors.given import Prior, from_scores
from search.priors.measure import Request, measure, rows_of
from search.priors.transfer import Source, recorded, transfer
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
    measured: Mapping[str, Any],
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
        measured: what another study of the same model and data has recorded, see `get_priors`.

    Raises:
        ValueError: a prior cannot be measured; one line.
    """
    known = {**measured, **get_priors(study)}
    settled = []
    for prior in priors:
        if isinstance(prior, str):
            scores = known.get(prior, {}).get("scores")
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
    _record(study, settled)
    return tuple(settled)


def settle_sources(
    study: optuna.Study, spec: StudySpec, sources: Sequence[Source]
) -> tuple[Prior, ...]:
    """Turn what other searches found into priors, and record it in the study.

    What the study took before counts as it was, whatever has become of the other study, and
    whether or not this run names it.

    Args:
        study: open for writing.
        spec: what it is about.
        sources: those that this run names.
    """
    known = {prior.name: prior for prior in recorded(study)}
    fresh = [transfer(source, spec.budget) for source in sources]
    _record(study, [prior for prior in fresh if prior.name not in known])
    return tuple(({prior.name: prior for prior in fresh} | known).values())


def _record(study: optuna.Study, priors: Sequence[Prior]) -> None:
    """Add priors to those that the study was given so far."""
    ours: dict[str, dict[str, Any]] = {}
    for prior in priors:
        ours[prior.name] = {"experts": prior.allocation.experts, "scores": prior.scores}
        if prior.source is not None:
            ours[prior.name]["source"] = {
                **asdict(prior.source),
                "worth": list(prior.source.worth),
            }
    if ours:
        set_priors(study, get_priors(study) | ours)
