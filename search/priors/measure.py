"""Measure a prior on the frozen model, in a process of its own.

The driver must hold no GPU: what it took there would be missing to the workers for the whole
search. So the model is loaded by a child process on this machine, before any worker starts, and the
GPU is free again when the child ends. The child is `python -m search.priors.measure`: a request as
JSON on stdin, an answer as JSON on stdout, progress on stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mola.settings import AdapterSettings, ModelSource, TrainSettings
from studies.strict import decode

if TYPE_CHECKING:
    from mola.data import TaskData

ALPHALORA = "alphalora"
MEASURED = (ALPHALORA, "gradient", "representation")
_LINES = 8  # of progress


@dataclass(frozen=True)
class Row:
    """A tokenised row of the training split; see `mola.data.TaskData`."""

    input_ids: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        name: One of `MEASURED`.
        model: The frozen base model.
        device: `cpu`, `cuda`, `auto` for several GPUs, or `any`: a GPU if there is one.
        adapter: The adapter but its allocation.
        train: Gives the batches' size.
        seed: Of the adapter's initial weights.
        rows: Of the training split; none for what depends on the model alone.
    """

    name: str
    model: ModelSource
    device: str = "any"
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    seed: int = 0
    rows: tuple[Row, ...] = ()


def rows_of(name: str, data: TaskData, train: TrainSettings, seed: int) -> tuple[Row, ...]:
    """Choose the training rows that a prior is measured on: the first ones of the trials' order."""
    from mola.train import batch_indices
    from search.priors import gradient, representation

    if name == "gradient":
        count = gradient.BATCHES * train.batch_size
    elif name == "representation":
        count = min(representation.ROWS, len(data.train))
    else:
        return ()
    records = [data.train[i] for i in batch_indices(len(data.train), count, 0, seed)]
    return tuple(Row(tuple(r["input_ids"]), r["prompt_length"]) for r in records)


def measure(request: Request, *, quiet: bool = False) -> list[float]:
    """Measure a prior's scores in a child process.

    Args:
        request: what to measure.
        quiet: without progress on stderr.

    Returns:
        A score per layer; higher is more experts.

    Raises:
        ValueError: it cannot be measured; one line.
    """
    packages = str(Path(__file__).resolve().parent.parent.parent)
    path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.run(
        [sys.executable, "-m", "search.priors.measure"],
        input=json.dumps(dataclasses.asdict(request)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        text=True,
        check=False,
    )
    if child.returncode != 0:
        raise ValueError(
            f"{request.name}: the process that measures it died with status {child.returncode}"
        )
    answer: dict[str, Any] = json.loads(child.stdout)
    if "error" in answer:
        raise ValueError(f"{request.name}: {answer['error']}")
    scores: list[float] = answer["scores"]
    return scores


def alphalora_scores(source: ModelSource, path: Path) -> list[float]:
    """Give a model's AlphaLoRA scores, from a file if they were measured before.

    Args:
        source: the model.
        path: of the file; written when the scores have been measured.

    Raises:
        ValueError: there is no such model, or it cannot be measured.
    """
    from mola.base import model_fingerprint
    from studies.files import write_json_atomic

    fingerprint = model_fingerprint(source)
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["model_fingerprint"] == fingerprint:
            return [float(score) for score in known["scores"]]
    scores = measure(Request(ALPHALORA, source))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"model_fingerprint": fingerprint, "scores": scores})
    return scores


def compute(request: Request, progress: Callable[[int], None]) -> list[float]:
    """Measure a prior's scores in this process.

    Args:
        request: what to measure.
        progress: told the number of each layer or batch that is done, from 0.

    Raises:
        ValueError: there is no such model, or it cannot be measured.
        FloatingPointError: a number is not finite.
    """
    from mola.base import load_model

    if request.name == ALPHALORA:
        from mola.weights import linear_weights
        from search.priors import alphalora

        return alphalora.scores(alphalora.layer_alphas(linear_weights(request.model), progress))
    model = load_model(request.model, _device(request.device))
    if request.name == "representation":
        from search.priors import representation

        prompts = [row.input_ids[: row.prompt_length] for row in request.rows]
        return representation.scores(model, prompts, progress=progress)
    from search.priors import gradient

    size = request.train.batch_size
    records = [dataclasses.asdict(row) for row in request.rows]
    return gradient.scores(
        model,
        request.adapter,
        [records[start : start + size] for start in range(0, len(records), size)],
        micro_batch=request.train.micro_batch or size,
        seed=request.seed,
        progress=progress,
    )


def _device(name: str) -> str:
    import torch

    if name != "any":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _steps(request: Request) -> tuple[int, str]:
    """Say how many steps the measurement has, and of what."""
    if request.name == ALPHALORA:
        from mola.base import num_layers

        return num_layers(request.model), "layer"
    from search.priors.representation import BATCH

    size = BATCH if request.name == "representation" else request.train.batch_size
    return -(-len(request.rows) // size), "batch"


def _answer(request: Request) -> dict[str, Any]:
    """Measure, with a line now and then on stderr; whatever goes wrong is the answer."""
    try:
        steps, unit = _steps(request)

        def progress(number: int) -> None:
            done = number + 1
            if done == steps or done % -(-steps // _LINES) == 0:
                sys.stderr.write(f"{request.name}: {unit} {done} of {steps}\n")
                sys.stderr.flush()

        return {"scores": compute(request, progress)}
    except Exception as error:  # the child's boundary
        return {"error": " ".join(str(error).split())[:500] or type(error).__name__}


def main() -> None:
    """Answer one request."""
    from search.console.terminal import calm_libraries

    calm_libraries()
    request: Request = decode(json.load(sys.stdin), Request, "the request")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no answer
            answer = _answer(request)
    except KeyboardInterrupt:
        sys.exit(130)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
