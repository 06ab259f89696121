"""Declare the options of full fine-tunes, which several commands share."""

from __future__ import annotations

from search.console.cli import MOST_ROWS, Whole, group, option, positive, rate
from search.full.plan import EPOCHS

full_training_options = group(
    option(
        "Training",
        "--epochs",
        type=positive,
        default=EPOCHS,
        help="Passes over the training split.",
    ),
    option(
        "Training",
        "--batch-size",
        type=Whole(1, MOST_ROWS),
        default=128,
        help="Rows per optimizer step.",
    ),
    option(
        "Training",
        "--micro-batch",
        type=positive,
        help="Rows per forward pass of a process; gradients add up.  [default: 8; with the "
        "built-in model the whole batch]",
    ),
    option(
        "Training",
        "--learning-rate",
        type=rate,
        help="Peak of a linear warm-up and decay.  [default: 3e-4; with the built-in model the "
        "search's]",
    ),
    option(
        "Training",
        "--warmup-steps",
        type=Whole(min=0),
        help="Steps of the warm-up.  [default: 100, or a tenth of all steps if that is less]",
    ),
    option(
        "Training",
        "--gradient-checkpointing",
        is_flag=True,
        help="Compute activations twice to save memory.",
    ),
)
