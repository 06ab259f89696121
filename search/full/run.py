"""Fine-tune one allocation in full, through interruptions, and save its adapter."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator, DistributedType
from transformers import PreTrainedModel

from mola.allocation import Allocation
from mola.base import checkpoint_activations
from mola.checkpoint import Progress, load_checkpoint, save_checkpoint
from mola.evaluate import Evaluation, evaluate
from mola.events import Step
from mola.model import MolaModel, detach, get_mola_model
from mola.settings import AdapterSettings, TrainSettings
from mola.train import finetune, make_optimizer
from mola.trial import make_config
from search.full.results import CHECKPOINT, Run, Scores

if TYPE_CHECKING:
    from mola.data import TaskData

CHECKPOINT_SECONDS = 30.0
_SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class StopRequestedError(RuntimeError):
    """A stop was requested; the fine-tune is saved."""


class TrainingError(RuntimeError):
    """A fine-tune cannot go on with these settings."""


def make_accelerator() -> Accelerator:
    """Make the accelerator of a run, as `accelerate launch` and its configuration say.

    Where they say nothing, a GPU that has bfloat16 trains in mixed precision with it. Each run
    gets one of its own, since it holds the state of float16's gradient scaler.

    Raises:
        ValueError: It would shard the model, which the checkpoints do not cover.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision is None and torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        precision = "bf16"
    accelerator = Accelerator(mixed_precision=precision)
    if accelerator.distributed_type in _SHARDING:
        raise ValueError(
            f"retraining under {accelerator.distributed_type.value} is not supported; "
            "use plain data parallelism (accelerate launch --multi_gpu)"
        )
    return accelerator


def full_run(
    model: PreTrainedModel,
    data: TaskData,
    name: str,
    allocation: Allocation,
    adapter: AdapterSettings,
    train: TrainSettings,
    *,
    seed: int,
    folder: Path,
    accelerator: Accelerator,
    stop_requested: Callable[[], bool],
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Generator[Step, None, Run]:
    """Train, evaluate and save one adapter, from wherever an earlier call stopped.

    The base model is as before when the generator ends, fails or is closed.

    Args:
        model: The frozen base model, on the accelerator's device.
        data: The tokenised task. The test split is read once, after the training.
        name: What people call the allocation.
        allocation: Experts per layer.
        adapter: Everything else about the adapter.
        train: Length, batch and learning rate.
        seed: Of the adapter's initial weights, the data's order and the dropout.
        folder: Where the adapter goes, and the checkpoint meanwhile; made if missing.
        accelerator: Device, precision and processes.
        stop_requested: Asked after each step, when the generator is resumed.
        checkpoint_seconds: Time between checkpoints, longer where writing one takes long.

    Yields:
        Each step, when it is done.

    Returns:
        The result.

    Raises:
        StopRequestedError: A stop was requested; a checkpoint is written.
        TrainingError: The loss is not finite, or the GPU's memory does not suffice.
        ValueError: The allocation does not fit the model, or the checkpoint is not of this run.
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mola_model = get_mola_model(model, make_config(allocation, adapter, seed))
    try:
        seconds = yield from _train(
            model,
            mola_model,
            data,
            train,
            seed,
            folder / CHECKPOINT,
            accelerator,
            stop_requested,
            checkpoint_seconds,
        )
        # Not through DistributedDataParallel, which would wait for processes with fewer batches.
        validation = scores(evaluate(mola_model, data.validation, accelerator=accelerator))
        test = None
        if data.test is not None:
            test = scores(evaluate(mola_model, data.test, accelerator=accelerator))
        mola_model.save_pretrained(folder, is_main_process=accelerator.is_main_process)
        accelerator.wait_for_everyone()
    except FloatingPointError as error:
        raise TrainingError(f"{error}; try a lower --learning-rate") from error
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            "out of GPU memory; try a lower --micro-batch or --gradient-checkpointing"
        ) from error
    finally:
        accelerator.free_memory()
        if train.gradient_checkpointing:
            checkpoint_activations(model, False)
        detach(mola_model).eval()  # type: ignore[no-untyped-call]
    return Run(name, allocation.experts, seed, train.steps, seconds, validation, test)


def to_the_end(steps: Generator[Step, None, Run], on_step: Callable[[Step], None]) -> Run:
    """Go through a fine-tune, tell of each step, and return the result."""
    while True:
        try:
            on_step(next(steps))
        except StopIteration as end:
            run: Run = end.value
            return run


def scores(evaluation: Evaluation) -> Scores:
    """Turn an evaluation into what results.json holds."""
    error = evaluation.standard_error
    return Scores(
        evaluation.objective,
        evaluation.accuracy,
        error if math.isfinite(error) else None,
        evaluation.rows,
    )


def _train(
    base: PreTrainedModel,
    mola_model: MolaModel,
    data: TaskData,
    train: TrainSettings,
    seed: int,
    path: Path,
    accelerator: Accelerator,
    stop_requested: Callable[[], bool],
    checkpoint_seconds: float,
) -> Generator[Step, None, float]:
    """Train to the end, saving a checkpoint now and then; return the wall clock of all sittings."""
    if train.gradient_checkpointing:
        checkpoint_activations(base, True)
    prepared, optimizer = accelerator.prepare(mola_model, make_optimizer(mola_model, train))
    progress = load_checkpoint(path, mola_model, optimizer, accelerator)
    began = time.perf_counter() - progress.seconds
    saved, pause = time.perf_counter(), checkpoint_seconds
    for event in finetune(
        prepared,
        optimizer,
        data.train,
        train,
        seed=seed,
        accelerator=accelerator,
        start_step=progress.step,
    ):
        progress = Progress(event.step, time.perf_counter() - began)
        yield event
        stop = _any_process(stop_requested(), accelerator)
        if stop or event.step == train.steps or time.perf_counter() - saved > pause:
            start = time.perf_counter()
            save_checkpoint(path, mola_model, optimizer, progress, accelerator)
            saved = time.perf_counter()
            pause = max(checkpoint_seconds, 20 * (saved - start))  # at most 5 % of the time
        if stop and event.step < train.steps:
            raise StopRequestedError(f"stopped after step {event.step} of {train.steps}")
    return progress.seconds


def _any_process(flag: bool, accelerator: Accelerator) -> bool:
    if accelerator.num_processes == 1:
        return flag
    total = accelerator.reduce(torch.tensor(float(flag), device=accelerator.device))
    return bool(total > 0)
