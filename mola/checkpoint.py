"""Save an unfinished fine-tune, and go on from it as if nothing had happened.

The adapter's weights and the optimizer's state are all that there is to save: a step's rows, its
learning rate and its random draws follow from the seed and the step's number (see `mola.train`).
They go into one safetensors file, which is replaced as a whole, so that it is never half written.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

_FORMAT = "mola checkpoint 1"


@dataclass(frozen=True)
class Progress:
    """How far a fine-tune is.

    Attributes:
        step: Optimizer steps done.
        seconds: Wall clock that they took, over all sittings.
    """

    step: int = 0
    seconds: float = 0.0


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    accelerator: Accelerator,
) -> None:
    """Replace the checkpoint of a fine-tune. Only the main process writes.

    Args:
        path: File to write; its folder exists.
        model: With the adapter, not wrapped by the accelerator.
        optimizer: Over all trainable parameters of the model, in their order.
        progress: Steps done.
        accelerator: Has the scaler of float16 gradients, if there is one.

    Raises:
        OSError: The file cannot be written; the older one is as it was.
    """
    if not accelerator.is_main_process:
        return
    tensors: dict[str, Tensor] = {}
    for name, parameter, state in _parameters(model, optimizer):
        tensors[f"weight/{name}"] = parameter.detach()
        tensors.update({f"{key}/{name}": value for key, value in state.items()})
    scaler = None if accelerator.scaler is None else accelerator.scaler.state_dict()
    about = {"step": progress.step, "seconds": progress.seconds, "scaler": scaler}
    draft = path.with_name(f".{uuid4().hex}.tmp")
    try:
        save_file(tensors, draft, metadata={"format": _FORMAT, "progress": json.dumps(about)})
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"{path}: cannot be written: {error}") from error
    finally:
        draft.unlink(missing_ok=True)


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> Progress:
    """Put model and optimizer back to where they were saved; nothing happens without a file.

    Args:
        path: The file that `save_checkpoint` wrote, if any.
        model: As for `save_checkpoint`, with a fresh adapter of the same configuration.
        optimizer: Fresh, over the same parameters.
        accelerator: As for `save_checkpoint`.

    Returns:
        How far the fine-tune was.

    Raises:
        ValueError: The file is none of this fine-tune's.
    """
    if not path.exists():
        return Progress()
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if metadata.get("format") != _FORMAT:
            raise ValueError("it is no checkpoint of this version")
        about: dict[str, Any] = json.loads(metadata["progress"])
        _restore(model, optimizer, tensors)
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(about["scaler"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path}: cannot go on from it: {error}; delete it to start again"
        ) from error
    return Progress(about["step"], about["seconds"])


def _restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    states: dict[int, dict[str, Tensor]] = {}
    for index, (name, parameter, _) in enumerate(_parameters(model, optimizer)):
        weight = tensors.pop(f"weight/{name}")
        if weight.shape != parameter.shape:
            raise ValueError(f"{name} is {tuple(weight.shape)}, not {tuple(parameter.shape)}")
        with torch.no_grad():
            parameter.copy_(weight)
        keys = [key for key in tensors if key.endswith(f"/{name}")]
        states[index] = {key.split("/", 1)[0]: tensors.pop(key) for key in keys}
    if tensors:
        raise ValueError(f"{len(tensors)} of its tensors are unknown here")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def _parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[tuple[str, nn.Parameter, dict[str, Tensor]]]:
    """List the trainable parameters with their names and the optimizer's state of each."""
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    return [
        (name, parameter, inner.state.get(parameter, {}))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
