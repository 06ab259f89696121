"""More experts where a fresh adapter's gradient is larger.

At initialisation B is zero, so that the gradient of A is zero and that of B is not. For each layer,
the score is the root of the mean over batches of |dL/dB|^2, over the layer's modules, with one
expert in every layer; L is the training loss of a batch in nats per answer token. A first step of
length s along a layer's gradient lowers the loss by s |dL/dB| to first order, so the experts are
handed out in proportion to what each layer offers at the start (see `search.priors.scores`).

This is the squared-gradient sensitivity of LoRA-SMoE (arXiv 2505.06272) with two changes: it is
taken at the adapter, not at the frozen weights, which costs the memory of a LoRA step and no
optimizer state, and its root is used, because the square would put nearly all experts in a few
layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from mola.allocation import Allocation
from mola.batching import answer_logits, collate
from mola.model import MolaModel, detach, get_mola_model
from mola.settings import AdapterSettings
from mola.trial import make_config
from mola.tuner import find_blocks

BATCHES = 4
"""Batches of the training split."""


def scores(
    model: PreTrainedModel,
    adapter: AdapterSettings,
    batches: Sequence[Sequence[Mapping[str, Any]]],
    *,
    micro_batch: int,
    seed: int,
    progress: Callable[[int], None],
) -> list[float]:
    """Measure each layer's gradient norm at the adapter's initialisation.

    Args:
        model: the frozen base model; as before when this returns or raises.
        adapter: rank, modules and scaling of the adapter.
        batches: tokenised training rows, see `mola.data`.
        micro_batch: rows per forward pass; gradients of a batch are added up.
        seed: of the adapter's initial weights.
        progress: told the number of each batch that is done.

    Raises:
        FloatingPointError: a gradient is not finite.
    """
    num_layers = len(find_blocks(model)[1])
    mola_model = get_mola_model(model, make_config(Allocation([1] * num_layers), adapter, seed))
    try:
        mola_model.eval()  # no dropout
        squares = torch.zeros(num_layers, dtype=torch.float64)
        for number, batch in enumerate(batches):
            _backward(mola_model, batch, micro_batch)
            squares += _squares(mola_model, num_layers) / len(batches)
            mola_model.zero_grad()
            progress(number)
    finally:
        detach(mola_model).eval()  # type: ignore[no-untyped-call]
    if not squares.isfinite().all():
        raise FloatingPointError("the gradient is not finite")
    roots: list[float] = squares.sqrt().tolist()
    return roots


def _backward(model: MolaModel, records: Sequence[Mapping[str, Any]], micro_batch: int) -> None:
    """Add up the gradients of a batch's mean loss per answer token."""
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    device = next(base.parameters()).device
    half = base.dtype in (torch.float16, torch.bfloat16)
    tokens = sum(len(r["input_ids"]) - r["prompt_length"] for r in records)
    for start in range(0, len(records), micro_batch):
        batch = collate(records[start : start + micro_batch], device)
        with torch.autocast(device.type, base.dtype, enabled=half):
            logits = answer_logits(model, batch)
        targets = batch.targets.to(logits.device)
        (F.cross_entropy(logits, targets, reduction="sum") / tokens).backward()


def _squares(model: MolaModel, num_layers: int) -> torch.Tensor:
    """Sum the squares of B's gradients per layer, [L] in float64."""
    squares = torch.zeros(num_layers, dtype=torch.float64)
    name = re.escape(find_blocks(model.get_base_model())[0])
    for key, parameter in model.named_parameters():
        layer = re.search(rf"\.{name}\.(\d+)\..*\.lora_B\.", key)
        if layer and parameter.grad is not None:
            squares[int(layer[1])] += float(parameter.grad.double().square().sum())
    return squares
