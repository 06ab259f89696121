"""Run one trial: attach a fresh adapter, train it, evaluate it, take it off again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accelerate import Accelerator
from transformers import PreTrainedModel

from mola.allocation import Allocation
from mola.base import checkpoint_activations
from mola.config import MolaConfig
from mola.evaluate import evaluate
from mola.events import Event, Finished, Rung
from mola.model import MolaModel, detach, get_mola_model, record_routing, routing_statistics
from mola.settings import AdapterSettings, TrainSettings
from mola.train import finetune, make_optimizer

if TYPE_CHECKING:
    from mola.data import TaskData


def make_config(allocation: Allocation, adapter: AdapterSettings, seed: int) -> MolaConfig:
    """Return the configuration of an adapter with this allocation."""
    return MolaConfig(
        experts=allocation.experts,
        r=adapter.r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules=None if adapter.target_modules is None else list(adapter.target_modules),
        top_k=adapter.top_k,
        router_aux_loss_coef=adapter.router_aux_loss_coef,
        init_seed=seed,
    )


def run_trial(
    model: PreTrainedModel,
    data: TaskData,
    allocation: Allocation,
    adapter: AdapterSettings,
    train: TrainSettings,
    *,
    seed: int,
    accelerator: Accelerator,
    rungs: tuple[int, ...] = (),
) -> Iterator[Event]:
    """Train and evaluate one allocation.

    The base model is as before when the iterator ends, fails or is closed.

    Args:
        model: The frozen base model.
        data: The tokenised task; trained on `train`, evaluated on `validation`.
        allocation: Experts per layer.
        adapter: Everything else about the adapter.
        train: Length, batch and learning rate.
        seed: Of the adapter's initial weights, the data's order and the dropout.
        accelerator: Device, precision and processes.
        rungs: Steps after which it is evaluated on the way, ascending and below `train.steps`.

    Yields:
        `Step` after each step, `Rung` after each evaluation on the way, `Finished` at the end.

    Raises:
        FloatingPointError: If a loss is not finite.
        ValueError: If the allocation does not fit the model.
    """
    mola_model = get_mola_model(model, make_config(allocation, adapter, seed))
    try:
        yield from _train_and_evaluate(
            model,
            mola_model,
            data,
            train,
            seed=seed,
            accelerator=accelerator,
            rungs=rungs,
            num_layers=allocation.num_layers,
        )
    finally:
        accelerator.free_memory()
        if train.gradient_checkpointing:
            checkpoint_activations(model, False)
        detach(mola_model).eval()  # type: ignore[no-untyped-call]


def _train_and_evaluate(
    base: PreTrainedModel,
    mola_model: MolaModel,
    data: TaskData,
    train: TrainSettings,
    *,
    seed: int,
    accelerator: Accelerator,
    rungs: tuple[int, ...],
    num_layers: int,
) -> Iterator[Event]:
    if train.gradient_checkpointing:
        checkpoint_activations(base, True)
    prepared, optimizer = accelerator.prepare(mola_model, make_optimizer(mola_model, train))
    train_seconds = eval_seconds = 0.0
    mark = time.perf_counter()  # moved on after each yield, so that waiting does not count
    for event in finetune(
        prepared, optimizer, data.train, train, seed=seed, accelerator=accelerator
    ):
        train_seconds += time.perf_counter() - mark
        yield event
        mark = time.perf_counter()
        if event.step in rungs and event.step < train.steps:
            scores = evaluate(prepared, data.validation, accelerator=accelerator)
            eval_seconds += time.perf_counter() - mark
            yield Rung(event.step, scores.objective, scores.accuracy)
            mark = time.perf_counter()
    with record_routing(mola_model) as record:
        scores = evaluate(prepared, data.validation, accelerator=accelerator)
    yield Finished(
        step=train.steps,
        objective=scores.objective,
        accuracy=scores.accuracy,
        standard_error=scores.standard_error,
        train_seconds=train_seconds,
        eval_seconds=eval_seconds + time.perf_counter() - mark,
        routing=routing_statistics(record, num_layers),
    )
