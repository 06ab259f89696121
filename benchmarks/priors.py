"""Compare the priors on the built-in model: do they agree, and are their allocations any good?

Prints the rank correlation (Spearman) of the layers' scores, and with `--seeds` also a fine-tune of
each allocation per seed, paired with uniform. `python benchmarks/priors.py --seeds 3` takes about
four minutes on one core.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import click
import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import PreTrainedModel

from mola.allocation import Allocation, ExpertBudget
from mola.base import load_model, load_tokenizer
from mola.batching import answer_logits, collate
from mola.data import TaskData, encode_splits, load_splits
from mola.demo import DEFAULTS
from mola.events import Finished
from mola.model import detach, get_mola_model
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from mola.trial import make_config, run_trial
from search.priors.measure import MEASURED, Request, compute, rows_of
from search.priors.named import named
from search.priors.scores import allocate

SOURCE = ModelSource()
TRAIN = TrainSettings(
    steps=int(DEFAULTS["steps"]),
    batch_size=int(DEFAULTS["batch_size"]),
    learning_rate=DEFAULTS["learning_rate"],
)
BUDGET = ExpertBudget(32, 160, 0)


@click.command()
@click.option("--seeds", type=int, default=0, help="Fine-tunes of each allocation.")
def main(seeds: int) -> None:
    """Print the tables."""
    data = encode_splits(
        load_splits(None, limit_validation=int(DEFAULTS["validation_rows"])),
        load_tokenizer(SOURCE),
        prompt_template=None,
        max_length=int(DEFAULTS["max_length"]),
        name="built-in task",
    )
    scores: dict[str, list[float]] = {}
    for name in MEASURED:
        start = time.perf_counter()
        request = Request(name, SOURCE, "cpu", train=TRAIN, rows=rows_of(name, data, TRAIN, 0))
        scores[name] = compute(request, lambda done: None)
        print(f"{name}: {time.perf_counter() - start:.1f} s")
    model = load_model(SOURCE)
    rows = rows_of("gradient", data, TRAIN, 1)
    again = Request("gradient", SOURCE, "cpu", train=TRAIN, seed=1, rows=rows)
    scores["gradient, seed 1"] = compute(again, lambda done: None)
    scores["influence"] = influence(model, data)
    print_correlations(scores)
    allocations = {
        name: allocate(np.clip(scores[name], 0, None).tolist(), BUDGET) for name in MEASURED
    }
    for name, allocation in allocations.items():
        print(f"{name}: {allocation}")
    if seeds:
        allocations = {"5555": named("5555", BUDGET), "8642": named("8642", BUDGET), **allocations}
        print_fine_tunes(model, data, allocations, seeds)


def influence(model: PreTrainedModel, data: TaskData) -> list[float]:
    """Give per layer the inner product of B's gradients on training and on validation rows."""
    settings = AdapterSettings()
    mola_model = get_mola_model(model, make_config(Allocation([1] * 32), settings, 0)).eval()

    def gradients(records: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
        mola_model.zero_grad()
        for start in range(0, len(records), 16):
            batch = collate(records[start : start + 16], "cpu")
            F.cross_entropy(
                answer_logits(mola_model, batch), batch.targets, reduction="sum"
            ).backward()
        by_layer: list[list[torch.Tensor]] = [[] for _ in range(32)]
        for name, parameter in mola_model.named_parameters():
            if "lora_B" in name and parameter.grad is not None:
                layer = int(name.split(".layers.")[1].split(".")[0])
                by_layer[layer].append(parameter.grad.double().flatten())
        return [torch.cat(pieces) for pieces in by_layer]

    gold = [row for row in data.validation if row["is_gold"]][:128]
    pairs = zip(gradients([data.train[i] for i in range(64)]), gradients(gold), strict=True)
    products = [float(a @ b) for a, b in pairs]
    detach(mola_model).eval()
    return products


def print_correlations(scores: Mapping[str, Sequence[float]]) -> None:
    """Print the rank correlations of the scores of each pair."""
    ranks = {name: np.argsort(np.argsort(values)) for name, values in scores.items()}
    table = np.corrcoef(np.stack(list(ranks.values())))
    print("rank correlation")
    for name, row in zip(ranks, table, strict=True):
        print(f"{name:18}" + "".join(f"{value:7.2f}" for value in row))


def print_fine_tunes(
    model: PreTrainedModel, data: TaskData, allocations: Mapping[str, Allocation], seeds: int
) -> None:
    """Print each allocation's objective per seed, and its paired difference to the first."""
    accelerator = Accelerator(cpu=True)
    measured: dict[str, list[float]] = {}
    for name, allocation in allocations.items():
        measured[name] = []
        for seed in range(seeds):
            events = run_trial(
                model,
                data,
                allocation,
                AdapterSettings(),
                TRAIN,
                seed=seed,
                accelerator=accelerator,
            )
            (last,) = [event for event in events if isinstance(event, Finished)]
            measured[name].append(last.objective)
        reference = next(iter(measured.values()))
        apart = [a - b for a, b in zip(measured[name], reference, strict=True)]
        error = stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
        values = " ".join(f"{value:.3f}" for value in measured[name])
        print(f"{name:18} {values}  to uniform {fmean(apart):+.3f} +- {error:.3f}", flush=True)


if __name__ == "__main__":
    main()
