"""Run trials one after the other on one base model, in whatever process holds it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mola.events import Event, Finished, Rung
from mola.settings import AdapterSettings, ModelSource, TrainSettings, with_less_memory
from search.workers.pool import Job, Memory

if TYPE_CHECKING:
    from mola.data import TaskData


@dataclass(frozen=True)
class Task:
    """What all trials of a search share.

    Attributes:
        model: The frozen base model.
        adapter: The adapter but its allocation.
        train: Length, batch and optimizer.
    """

    model: ModelSource
    adapter: AdapterSettings
    train: TrainSettings


class ProxyWorker:
    """Run trials one after the other on one base model; lives in a process of its own.

    Args:
        task: what all trials share.
        data: the tokenised rows; Ray hands them over without a copy per worker.
        device: see `Layout.device`.
        threads: threads of torch.
    """

    def __init__(self, task: Task, data: TaskData, device: str, threads: int) -> None:
        self._task = task
        self._data = data
        self._device = device
        self._threads = threads
        self._model: Any = None
        self._accelerator: Any = None
        self._trial: Generator[Event, None, None] | None = None

    def load(self) -> int:
        """Load the base model, once for all trials.

        Returns:
            The process id.
        """
        import torch
        from accelerate import Accelerator

        import mola.trial  # noqa: F401  # so that the first trial does not pay for it
        from mola.base import load_model

        torch.set_num_threads(self._threads)
        self._model = load_model(self._task.model, self._device)
        halves = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        on_cpu = self._device == "cpu"
        precision = "no" if on_cpu else halves.get(self._model.dtype, "no")
        self._accelerator = Accelerator(cpu=on_cpu, mixed_precision=precision)
        gc.freeze()  # what is here stays, so that no collection between trials looks at it again
        return os.getpid()

    def start(self, job: Job, max_seconds: float) -> list[Event | Memory]:
        """Begin a trial; see `advance`."""
        from mola.trial import run_trial

        adapter, train = self._task.adapter, self._task.train
        trial = run_trial(
            self._model,
            self._data,
            job.allocation,
            adapter,
            with_less_memory(train, adapter) if job.save_memory else train,
            seed=job.seed,
            accelerator=self._accelerator,
            rungs=job.rungs,
        )
        self._trial = cast(Generator[Event, None, None], trial)
        return self.advance(max_seconds)

    def advance(self, max_seconds: float) -> list[Event | Memory]:
        """Go on with the trial until a rung, its end, or the time is up.

        Args:
            max_seconds: wall clock; the step under way is finished.

        Returns:
            What happened, the last event last; before it, on GPUs, the memory in use.
        """
        if self._trial is None:
            raise RuntimeError("no trial is running")
        deadline = time.monotonic() + max_seconds
        events: list[Event | Memory] = _gpu_memory(self._device)
        for event in self._trial:
            events.append(event)
            if isinstance(event, Finished):
                self.stop()
            if isinstance(event, (Rung, Finished)) or time.monotonic() >= deadline:
                return events
        raise RuntimeError("the trial ended without a result")

    def stop(self) -> None:
        """End the trial, if there is one, and take its adapter off the base model."""
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.close()


def _gpu_memory(device: str) -> list[Event | Memory]:
    """Read the peak memory of this process on the GPUs that it sees; nothing on CPUs."""
    if device == "cpu":
        return []
    import torch

    gpus = range(torch.cuda.device_count())
    used = sum(torch.cuda.max_memory_reserved(gpu) for gpu in gpus)
    total = sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
    return [Memory(used, total)]
