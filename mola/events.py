"""Say what a trial reports while it runs: plain data, free of torch, sent from worker to driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """One optimizer step is done.

    Attributes:
        step: Steps done so far, from 1.
        loss: Training loss of the step in nats per output token.
    """

    step: int
    loss: float


@dataclass(frozen=True)
class Rung:
    """An evaluation before the last step; the trial waits for a decision here.

    Attributes:
        step: Steps done so far.
        objective: Validation objective, in the study's unit; lower is better.
        accuracy: Fraction of validation rows that are right, 0 to 1.
    """

    step: int
    objective: float
    accuracy: float


@dataclass(frozen=True)
class Finished:
    """The last evaluation.

    Attributes:
        step: Steps done.
        objective: Validation objective, in the study's unit; lower is better.
        accuracy: Fraction of validation rows that are right, 0 to 1.
        standard_error: Standard error of `objective` over the validation rows.
        train_seconds: Wall clock of the training steps.
        eval_seconds: Wall clock of all evaluations.
        routing: Expert load and router entropy per layer, see `mola.model.routing_statistics`.
    """

    step: int
    objective: float
    accuracy: float
    standard_error: float
    train_seconds: float
    eval_seconds: float
    routing: dict[str, Any] = field(default_factory=dict)


Event = Step | Rung | Finished
