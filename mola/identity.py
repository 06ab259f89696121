"""Tell whether an adapter meets the base model that it was trained on.

An adapter's shapes fit every model of the same size, so that an adapter of Llama-2 goes onto
Code Llama without a complaint and makes it worse. A name does not tell either: folders are moved,
and a hub id changes its weights. So the adapter's configuration keeps the architecture and a few
weights of the layers. Another architecture is refused. Other weights get a warning
alone, because people put adapters onto variants of a model on purpose.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mola.config import MolaConfig

NUM_WEIGHTS = 32
# A weight that went through bfloat16 once is off by at most 2**-9 of itself; float16 has a floor.
RELATIVE, ABSOLUTE = 2.0**-8, 1e-7


def with_base(config: MolaConfig, model_config: Any, layers: Sequence[nn.Module]) -> MolaConfig:
    """Return a configuration that says what the adapter is attached to; compare if it did.

    Args:
        config: The adapter's. It stays as it is, since people attach one to several models.
        model_config: The base model's.
        layers: The base model's linear layers, in their order.

    Raises:
        ValueError: If the adapter belongs to another architecture.

    Warns:
        UserWarning: If the base model has other weights than the one that the adapter belongs to.
    """
    config = copy.copy(config)
    name = config.base_model_name_or_path or "of unknown name"
    model_type = getattr(model_config, "model_type", None)
    if config.base_model_type is None:
        config.base_model_type = model_type
    elif config.base_model_type != model_type:
        raise ValueError(
            f"the adapter belongs to a model of type {config.base_model_type!r} ({name}), but this "
            f"one is {model_type!r}; load the adapter onto the model that it was trained on"
        )
    weights = _some_weights(layers)
    if config.base_weights is None:
        config.base_weights = weights
    elif weights is not None and not _alike(config.base_weights, weights):
        warnings.warn(
            "the base model has other weights than the one that the adapter was trained on "
            f"({name}): its shapes fit, but its outputs may be wrong",
            stacklevel=2,
        )
    return config


def _some_weights(layers: Sequence[nn.Module]) -> list[float] | None:
    """Pick weights of the first and the last layer; None where they are packed or not there."""
    picked: list[float] = []
    for layer in (*layers[:1], *layers[-1:]):
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        plain = type(weight.data) is torch.Tensor and weight.is_floating_point()  # not packed
        if not plain or weight.device.type == "meta" or weight.numel() == 0:
            return None
        places = torch.linspace(0, weight.numel() - 1, NUM_WEIGHTS // 2).long()
        values = weight.detach().flatten()[places.to(weight.device)].float()
        picked += [float(f"{value:.6g}") for value in values.tolist()]
    return picked


def _alike(recorded: list[float], weights: list[float]) -> bool:
    return len(recorded) == len(weights) and all(
        abs(a - b) <= RELATIVE * max(abs(a), abs(b)) + ABSOLUTE
        for a, b in zip(recorded, weights, strict=True)
    )
