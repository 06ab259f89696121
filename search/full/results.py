"""Define results.json of a retrain: under which conditions it was made, and what came out."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mola.settings import AdapterSettings, ModelSource, TrainSettings
from studies.files import write_json_atomic
from studies.strict import decode

FORMAT_VERSION = 1
CHECKPOINT = "unfinished.safetensors"  # beside an adapter whose fine-tune is not over


@dataclass(frozen=True)
class Scores:
    """The evaluation of a split.

    Attributes:
        objective: In the unit that the conditions name; lower is better.
        accuracy: Fraction of the rows that are right.
        standard_error: Of the objective, over the rows; None with one row.
        rows: Rows evaluated.
    """

    objective: float
    accuracy: float
    standard_error: float | None
    rows: int


@dataclass(frozen=True)
class Run:
    """A finished fine-tune.

    Attributes:
        name: What people call the allocation.
        experts: The allocation, layer 0 first.
        seed: Of the initial weights, the data's order and the dropout.
        steps: Optimizer steps.
        train_seconds: Wall clock of the training, over all sittings.
        validation: On the split that the search has decided by.
        test: On the test split; None where there is none.
    """

    name: str
    experts: tuple[int, ...]
    seed: int
    steps: int
    train_seconds: float
    validation: Scores
    test: Scores | None


@dataclass(frozen=True)
class Conditions:
    """What all fine-tunes of a folder have in common.

    Attributes:
        experts: The allocation whose adapter the folder holds.
        seed: The first seed, that of the folder's adapter.
        model: Where the base model comes from.
        model_fingerprint: Identifies its weights.
        data: The data set's name.
        data_fingerprint: Identifies its rows, as the model sees them.
        objective: Unit of the objective.
        prompt_template: How a row became a prompt; None is the default.
        max_length: Tokens per row at most.
        adapter: The adapter but its allocation.
        train: Length, batch and optimizer.
        mixed_precision: Accelerate's name of it.
        processes: Number of processes that shared each batch.
    """

    experts: tuple[int, ...]
    seed: int
    model: ModelSource
    model_fingerprint: str
    data: str
    data_fingerprint: str
    objective: str
    prompt_template: str | None
    max_length: int
    adapter: AdapterSettings
    train: TrainSettings
    mixed_precision: str
    processes: int


@dataclass(frozen=True)
class Results:
    """The content of results.json.

    Attributes:
        format_version: Version of this format.
        conditions: Common to all runs.
        frozen: The base model without an adapter, by split; empty until it was evaluated.
        runs: Finished fine-tunes, in the order in which they finished.
    """

    format_version: int
    conditions: Conditions
    frozen: dict[str, Scores]
    runs: tuple[Run, ...]


def read_results(path: Path) -> Results | None:
    """Read results.json; None if there is none.

    Raises:
        ValueError: The file cannot be read or is not of this format; names the field.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document.get("format_version") if isinstance(document, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version is {version!r}, expected {FORMAT_VERSION}")
        results: Results = decode(document, Results, "results")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    return results


def write_results(path: Path, results: Results) -> None:
    """Write results.json, whole or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    write_json_atomic(path, dataclasses.asdict(results))


def differences(here: Conditions, there: Conditions) -> list[str]:
    """Name what differs between two runs' conditions.

    The model and the data are compared by their fingerprints, so that a folder may move.
    Gradient checkpointing recomputes the same numbers and may be turned on on the way.

    Args:
        here: What is asked for now.
        there: What the folder was made with.

    Returns:
        Lines like `train.learning_rate: 0.001 here, 0.0003 there`.
    """
    mine, theirs = _flat(here), _flat(there)
    return [
        f"{key}: {mine[key]} here, {theirs[key]} there" for key in mine if mine[key] != theirs[key]
    ]


def _flat(conditions: Conditions) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in dataclasses.asdict(conditions).items():
        if key in ("model", "data"):  # their fingerprints count
            continue
        if isinstance(value, dict):
            flat.update({f"{key}.{inner}": part for inner, part in value.items()})
        else:
            flat[key] = value
    flat["model.dtype"] = conditions.model.dtype
    del flat["train.gradient_checkpointing"]
    return flat
