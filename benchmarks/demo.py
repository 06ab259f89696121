"""Measure what proxies on the built-in model resolve: `python benchmarks/demo.py`.

Every allocation is trained and evaluated on the same seeds. A two-way analysis of variance without
replication, `objective = mean + allocation + seed + residual`, then separates what the search
looks for (allocations) from what pairing removes (seeds) and what noise is left (residual).
With `--layers`, measure instead how much each layer of the base model matters.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from mola.allocation import Allocation, ExpertBudget
from mola.base import load_model, load_tokenizer
from mola.data import TaskData, encode_splits, load_splits
from mola.demo import DEFAULTS, MODEL_DIR
from mola.demo.corpus import score_family
from mola.evaluate import evaluate
from mola.events import Finished
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from mola.trial import run_trial
from search.priors.named import NAMES, named

BUDGET = ExpertBudget(32, 160, low=int(DEFAULTS["min_experts"]))
SKILLS = ("compare", "extreme", "neighbour", "parity", "arithmetic", "rewrite")
BOLD = {
    "first": "10x16 0x16",
    "middle": "0x8 10x16 0x8",
    "last": "0x16 10x16",
    # the model was grown from 8 layers: every fourth does most of the work, see its README
    "working": " ".join(["10 10 0 0"] * 8),
    "idle": " ".join(["0 0 10 10"] * 8),
}


@dataclass(frozen=True)
class Variance:
    """Standard deviations of a table of objectives, [allocations, seeds], in nats per row.

    Attributes:
        allocations: Between allocations, the residual's part taken off.
        seeds: Between seeds, likewise.
        residual: What is left of a value when its allocation and its seed are known.
        f: Mean square between allocations over the residual's; 1 if allocations are the same.
    """

    allocations: float
    seeds: float
    residual: float
    f: float


def analyse(objectives: np.ndarray) -> Variance:
    """Split a complete table's variance, [allocations, seeds], at least 2 of each."""
    rows, columns = objectives.shape
    by_row, by_column = objectives.mean(axis=1), objectives.mean(axis=0)
    left = objectives - by_row[:, None] - by_column[None, :] + objectives.mean()
    residual = float((left**2).sum()) / ((rows - 1) * (columns - 1))
    between_rows = columns * float(by_row.var(ddof=1))
    between_columns = rows * float(by_column.var(ddof=1))
    return Variance(
        allocations=math.sqrt(max(0.0, between_rows - residual) / columns),
        seeds=math.sqrt(max(0.0, between_columns - residual) / rows),
        residual=math.sqrt(residual),
        f=between_rows / residual,
    )


def run_proxy(
    model: PreTrainedModel, data: TaskData, allocation: Allocation, train: TrainSettings, seed: int
) -> Finished:
    """Train and evaluate one allocation on the CPU."""
    events = run_trial(
        model, data, allocation, AdapterSettings(), train, seed=seed, accelerator=Accelerator()
    )
    *_, last = events
    assert isinstance(last, Finished)
    return last


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--random", type=int, default=8, help="random allocations [default: 8]")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each [default: 3]")
    parser.add_argument("--threads", type=int, default=1, help="torch threads [default: 1]")
    parser.add_argument("--layers", action="store_true", help="skip layers of the base model")
    parser.add_argument("--model", help="a model folder [default: the built-in model]")
    for name in ("steps", "batch_size", "validation_rows"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=DEFAULTS[name])
    parser.add_argument("--learning-rate", type=float, default=DEFAULTS["learning_rate"])
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    source = ModelSource(name=options.model, dtype="float32")
    if options.layers:
        _print_layers(options.model or MODEL_DIR)
        return
    model = load_model(source)
    data = encode_splits(
        load_splits(None, limit_validation=options.validation_rows),
        load_tokenizer(source),
        prompt_template=None,
        max_length=int(DEFAULTS["max_length"]),
        name="the built-in task",
    )
    frozen = evaluate(model, data.validation, accelerator=Accelerator())
    print(f"frozen    {frozen.objective:.4f} nats per row  accuracy {frozen.accuracy:.3f}")
    print(f"          {frozen.rows} rows, standard error {frozen.standard_error:.4f}")
    train = TrainSettings(
        steps=options.steps, batch_size=options.batch_size, learning_rate=options.learning_rate
    )
    allocations = {name: named(name, BUDGET) for name in NAMES}
    allocations |= {name: Allocation.parse(shape) for name, shape in BOLD.items()}
    rng = np.random.default_rng(0)
    for index in range(options.random):
        allocations[f"random {index}"] = BUDGET.uniform(rng)
    table = np.array(
        [
            _measure_row(name, model, data, allocation, train, options.seeds)
            for name, allocation in allocations.items()
        ]
    )
    if options.seeds > 1:
        found = analyse(table)
        print(
            f"standard deviations: allocations {found.allocations:.4f}  seeds {found.seeds:.4f}  "
            f"residual {found.residual:.4f}  (F = {found.f:.1f})"
        )


@contextmanager
def skipped(layer: Any) -> Iterator[None]:
    """Make a Llama layer pass its input on, by taking away what it adds to the residual stream."""
    weights = [layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight]
    kept = [weight.clone() for weight in weights]
    for weight in weights:
        weight.zero_()
    try:
        yield
    finally:
        for weight, old in zip(weights, kept, strict=True):
            weight.copy_(old)


def _print_layers(folder: str | Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def nll() -> float:
        scores = [score_family(model, tokenizer, skill, rows=50).nll for skill in SKILLS]
        return sum(scores) / len(scores)

    whole = nll()
    print(f"nats per answer, mean of {', '.join(SKILLS)}: {whole:.4f}")
    for index, layer in enumerate(model.model.layers):
        with skipped(layer):
            rise = nll() - whole
        print(f"without layer {index:2d}: {rise:+.4f}", flush=True)


def _measure_row(
    name: str,
    model: PreTrainedModel,
    data: TaskData,
    allocation: Allocation,
    train: TrainSettings,
    seeds: int,
) -> list[float]:
    start = time.perf_counter(), time.process_time()
    results = [run_proxy(model, data, allocation, train, seed) for seed in range(seeds)]
    wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    print(
        f"{name:9s} "
        + " ".join(f"{result.objective:.4f}" for result in results)
        + f"  accuracy {np.mean([result.accuracy for result in results]):.3f}"
        + f"  {wall / seeds:.1f} s each ({cpu / seeds:.1f} s CPU)  {allocation}",
        flush=True,
    )
    return [result.objective for result in results]


if __name__ == "__main__":
    main()
