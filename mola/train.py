"""Fine-tune an adapter: the one training path of proxies and full runs.

A step's rows and random draws are functions of (seed, step) alone. Hence all trials of one seed
see the same data in the same order and the same dropout stream, and a run that is continued from
its adapter and optimizer goes on as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from torch.nn import functional as F

from mola.batching import answer_logits, collate
from mola.events import Step
from mola.model import tuner
from mola.settings import TrainSettings


def make_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """Return AdamW over the adapter's parameters, without weight decay, as the paper uses it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0, fused=True)


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Return the learning rate of a step: linear warm-up to the peak, linear decay to zero.

    Args:
        step: From 0 to `settings.steps - 1`.
        settings: Peak, warm-up and length.
    """
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / (settings.warmup + 1)
    remaining = (settings.steps - step) / max(settings.steps - settings.warmup, 1)
    return settings.learning_rate * remaining


def batch_indices(num_rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Return the rows of a step: consecutive pieces of one random permutation per epoch.

    Args:
        num_rows: Rows of the training split.
        batch_size: Rows of a step; more than `num_rows` repeats rows.
        step: From 0.
        seed: Of the order.
    """
    rows: list[int] = []
    position = step * batch_size
    while len(rows) < batch_size:
        epoch, offset = divmod(position, num_rows)
        order = _permutation(num_rows, seed, epoch)
        taken = order[offset : offset + batch_size - len(rows)]
        rows += taken
        position += len(taken)
    return rows


def finetune(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset,
    settings: TrainSettings,
    *,
    seed: int,
    accelerator: Accelerator,
    start_step: int = 0,
) -> Iterator[Step]:
    """Train the adapter, one yield per optimizer step.

    Args:
        model: With an adapter; prepared by the accelerator, as is the optimizer.
        optimizer: From `make_optimizer`.
        data: The tokenised training split, see `mola.data`.
        settings: Length, batch and learning rate.
        seed: Of the data's order and the dropout.
        accelerator: Device, precision and processes. A batch is split over the processes.
        start_step: Steps that are done already.

    Raises:
        FloatingPointError: If the loss is not finite.
        ValueError: If a batch has fewer rows than there are processes.
    """
    if settings.batch_size < accelerator.num_processes:
        raise ValueError(
            f"batch_size={settings.batch_size} is less than one row for each of the "
            f"{accelerator.num_processes} processes"
        )
    micro_batch = settings.micro_batch or settings.batch_size
    parameters = [p for p in model.parameters() if p.requires_grad]
    for step in range(start_step, settings.steps):
        model.train()
        torch.manual_seed(_step_seed(seed, step, accelerator.process_index))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        rows = batch_indices(len(data), settings.batch_size, step, seed)
        records = [data[i] for i in rows]
        tokens = sum(len(r["input_ids"]) - r["prompt_length"] for r in records)
        mine = records[accelerator.process_index :: accelerator.num_processes]
        loss = _accumulate(model, mine, micro_batch, tokens, accelerator)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the training loss is {loss} at step {step + 1}")
        accelerator.clip_grad_norm_(parameters, settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(step + 1, loss)


def _accumulate(
    model: nn.Module,
    records: list[dict[str, Any]],
    micro_batch: int,
    tokens: int,
    accelerator: Accelerator,
) -> float:
    """Add up the gradients of a batch's mean loss per token; return it, over all processes."""
    total = torch.zeros((), device=accelerator.device)
    pieces = [records[i : i + micro_batch] for i in range(0, len(records), micro_batch)]
    for number, piece in enumerate(pieces, start=1):
        batch = collate(piece, accelerator.device)
        last = number == len(pieces)
        with nullcontext() if last else accelerator.no_sync(model):
            loss = F.cross_entropy(answer_logits(model, batch), batch.targets, reduction="sum")
            # the processes' gradients are averaged, so each scales its share of the sum up again
            loss = loss * (accelerator.num_processes / tokens)
            total += loss.detach()
            mola = tuner(model)
            if mola is not None and mola.balances:
                loss = loss + mola.balance_loss() * (len(piece) / len(records))
            accelerator.backward(loss)
    return float(accelerator.reduce(total, reduction="mean"))


@lru_cache(maxsize=2)
def _permutation(num_rows: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(_mix(seed, epoch, "order"))
    order: list[int] = torch.randperm(num_rows, generator=generator).tolist()
    return order


def _step_seed(seed: int, step: int, process: int) -> int:
    return _mix(seed, step, f"dropout {process}")


def _mix(seed: int, index: int, purpose: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{index}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
