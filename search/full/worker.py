"""Run full fine-tunes one after the other on one base model, in whatever process holds it."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mola.events import Event, Step
from search.full.results import Run
from search.workers.pool import Job, Memory
from search.workers.proxy import ProxyWorker


@dataclass(frozen=True)
class FullJob(Job):
    """What a worker is told to fine-tune in full.

    Attributes:
        name: What people call the allocation.
        folder: Absolute; of the adapter, and of the checkpoint that an interruption leaves. On a
            cluster it is on a drive that all nodes share.
    """

    name: str = ""
    folder: Path = Path()


class FullWorker(ProxyWorker):
    """A worker whose trials are full fine-tunes: they end with a `Run`, and go on after a stop."""

    _steps: Generator[Step, None, Run] | None = None
    _stopping = False

    def start(self, job: Job, max_seconds: float) -> list[Any]:
        """Begin or continue a fine-tune; see `advance`."""
        from search.full.run import full_run

        assert isinstance(job, FullJob)
        self._stopping = False
        self._steps = full_run(
            self._model,
            self._data,
            job.name,
            job.allocation,
            self._task.adapter,
            self._task.train,
            seed=job.seed,
            folder=job.folder,
            accelerator=self._fresh_accelerator(),
            stop_requested=lambda: self._stopping,
        )
        return self.advance(max_seconds)

    def advance(self, max_seconds: float) -> list[Any]:
        """Go on with the fine-tune until its last step, its end, or the time is up.

        The last step is told of at once, because the evaluation after it may take long.

        Args:
            max_seconds: Wall clock; the step or evaluation under way is finished.

        Returns:
            `Step` for each step, and `Run` at the end.
        """
        if self._steps is None:
            raise RuntimeError("no fine-tune is running")
        deadline = time.monotonic() + max_seconds
        events: list[Event | Memory | Run] = []
        while not events or time.monotonic() < deadline:
            try:
                step = next(self._steps)
            except StopIteration as end:
                self._steps = None
                return [*events, end.value]
            events.append(step)
            if step.step == self._task.train.steps:
                break
        return events

    def stop(self) -> None:
        """Save the fine-tune where it stands, if there is one, and take its adapter off."""
        from search.full.run import StopRequestedError

        steps, self._steps = self._steps, None
        if steps is None:
            return
        self._stopping = True
        with suppress(StopRequestedError, StopIteration):
            next(steps)  # sees the request before anything else

    def _fresh_accelerator(self) -> Any:
        """Make an accelerator like the worker's; each run holds a gradient scaler of its own."""
        from accelerate import Accelerator

        precision = self._accelerator.mixed_precision
        return Accelerator(cpu=self._device == "cpu", mixed_precision=precision)
