"""Compare whole proxies, training and evaluation: `python -m benchmarks.proxy`.

On one side this project's: a MoLA adapter, logits at the answer tokens alone, candidates sorted by
length, a prompt computed once for all of its candidates. On the other what one writes first: PEFT's
LoRA of the same total rank, Transformers' Trainer, and an evaluation of each candidate by itself,
in the order of the rows, with all logits. Both train on the same token ids for as many steps and
evaluate the same rows; the other side's adapter is evaluated by both, and the two must agree.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from benchmarks.layer import allocation_for
from benchmarks.variants import ALPHA, DROPOUT, TOP_K, R, attach_lora
from mola.base import load_model, load_tokenizer
from mola.data import TaskData, encode_splits, load_splits
from mola.demo import DEFAULTS
from mola.evaluate import evaluate
from mola.events import Finished
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from mola.trial import run_trial


@dataclass(frozen=True)
class Result:
    """A proxy's wall clock in seconds, and its objective."""

    train_seconds: float
    eval_seconds: float
    objective: float

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return self.train_seconds + self.eval_seconds


def padded(records: Sequence[Any]) -> dict[str, Tensor]:
    """Pad records on the right, with labels on the answer tokens alone."""
    width = max(len(record["input_ids"]) for record in records)
    ids = torch.zeros(len(records), width, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, record in enumerate(records):
        tokens, start = torch.as_tensor(record["input_ids"]), record["prompt_length"]
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        labels[row, start : len(tokens)] = tokens[start:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def candidate_log_likelihoods(
    model: nn.Module, data: Dataset, batch_size: int, device: torch.device
) -> Iterator[float]:
    """Score each candidate answer by a pass over its prompt and itself."""
    for start in range(0, len(data), batch_size):
        batch = padded([data[i] for i in range(start, min(start + batch_size, len(data)))])
        batch = {key: value.to(device) for key, value in batch.items()}
        labels = batch.pop("labels")[:, 1:]
        with torch.inference_mode():
            log_p = model(**batch).logits[:, :-1].float().log_softmax(-1)
        picked = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        yield from (picked * (labels >= 0)).sum(-1).tolist()


def plain_objective(scores: Sequence[float], data: Dataset, has_choices: bool) -> float:
    """Return what `mola.evaluate` calls the objective."""
    if not has_choices:
        tokens = sum(len(r["input_ids"]) - r["prompt_length"] for r in data)
        return -sum(scores) / tokens
    rows: dict[int, list[tuple[float, bool]]] = {}
    for score, record in zip(scores, data, strict=True):
        rows.setdefault(record["row"], []).append((score, record["is_gold"]))
    losses = [
        float(torch.tensor([s for s, _ in row]).logsumexp(0)) - next(s for s, gold in row if gold)
        for row in rows.values()
    ]
    return statistics.mean(losses)


def plain_proxy(model: PreTrainedModel, data: TaskData, train: TrainSettings) -> tuple[Result, Any]:
    """Train PEFT's LoRA with the Trainer, then evaluate candidate by candidate."""
    allocation = allocation_for(model)
    adapted = attach_lora(model, R * round(allocation.total / allocation.num_layers))
    device = next(adapted.parameters()).device
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=train.steps, per_device_train_batch_size=train.batch_size,
            learning_rate=train.learning_rate, warmup_steps=train.warmup, save_strategy="no",
            report_to=[], disable_tqdm=True, remove_unused_columns=False,
            use_cpu=device.type == "cpu", logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(adapted, settings, train_dataset=data.train, data_collator=padded)
        start = time.perf_counter()
        trainer.train()
    trained = time.perf_counter()
    adapted.eval()
    scores = list(candidate_log_likelihoods(adapted, data.validation, train.batch_size, device))
    objective = plain_objective(scores, data.validation, data.has_choices)
    seconds = trained - start, time.perf_counter() - trained
    return Result(*seconds, objective), adapted


def our_proxy(model: PreTrainedModel, data: TaskData, train: TrainSettings) -> Result:
    """Run a trial as the search does."""
    adapter = AdapterSettings(r=R, lora_alpha=ALPHA, lora_dropout=DROPOUT, top_k=TOP_K)
    start = time.perf_counter()
    *_, last = run_trial(
        model, data, allocation_for(model), adapter, train, seed=0, accelerator=Accelerator()
    )
    assert isinstance(last, Finished)
    seconds = time.perf_counter() - start
    return Result(seconds - last.eval_seconds, last.eval_seconds, last.objective)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder of a model; default: the built-in one")
    parser.add_argument("--data", help="folder of a data set; default: the built-in one")
    parser.add_argument("--steps", type=int, default=DEFAULTS["steps"])
    parser.add_argument("--batch-size", type=int, default=DEFAULTS["batch_size"])
    parser.add_argument("--rows", type=int, default=DEFAULTS["validation_rows"], help="evaluated")
    parser.add_argument("--max-length", type=int, default=DEFAULTS["max_length"], help="in tokens")
    parser.add_argument("--rounds", type=int, default=3, help="proxies of each kind (default: 3)")
    options = parser.parse_args()
    source = ModelSource(options.model)
    data = encode_splits(
        load_splits(options.data, limit_validation=options.rows),
        load_tokenizer(source),
        prompt_template=None,
        max_length=options.max_length,
        name="the benchmark's",
    )
    train = TrainSettings(
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=float(DEFAULTS["learning_rate"]),
    )
    examples = options.steps * options.batch_size + len(set(data.validation["row"]))
    ratios = []
    print(f"{'':<22}{'train s':>9}{'evaluate s':>12}{'examples/s':>12}{'objective':>11}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for _ in range(options.rounds):
        ours = our_proxy(load_model(source, device), data, train)
        plain, adapted = plain_proxy(load_model(source, device), data, train)
        again = evaluate(adapted, data.validation, accelerator=Accelerator())
        for name, result in (("MoLA (ours)", ours), ("LoRA and Trainer", plain)):
            print(
                f"{name:<22}{result.train_seconds:>9.1f}{result.eval_seconds:>12.1f}"
                f"{examples / result.seconds:>12.1f}{result.objective:>11.5f}"
            )
        print(f"{'  evaluated by us':<43}{'':>12}{again.objective:>11.5f}", flush=True)
        if abs(again.objective - plain.objective) > 1e-3:
            raise SystemExit("the two evaluations of one adapter disagree")
        ratios.append(plain.seconds / ours.seconds)
    print(f"ours is {statistics.median(ratios):.2f} times as fast (median of {len(ratios)})")


if __name__ == "__main__":
    main()
