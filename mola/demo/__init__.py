"""Provide the built-in demonstration model and its fine-tuning task.

Both are small enough for a laptop's CPU, so that a search can be tried without a download.
Importing this package costs neither torch nor datasets.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

MODEL_DIR = Path(__file__).parent / "model"

# A search of about five minutes on two CPU cores, under the names of the search's settings. Layers
# may stay frozen, which is where allocations differ most on a model as small as this.
DEFAULTS: dict[str, int | float] = {
    "trials": 30,
    "min_experts": 0,
    "steps": 28,
    "batch_size": 16,
    "learning_rate": 3e-3,
    "max_length": 64,
    "validation_rows": 250,
}


def load_task() -> dict[str, Dataset]:
    """Generate the fine-tuning task; always the same rows.

    Returns:
        Splits `train`, `validation` and `test` with columns instruction, input, output, choices.
        No row is in two splits.
    """
    from mola.demo.task import generate_splits

    return generate_splits()
