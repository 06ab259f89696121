"""Read the linear layers' weights of a frozen model one at a time, without loading the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from mola.base import load_config, load_model, readable_errors, source_arguments, source_path
from mola.settings import ModelSource
from mola.tuner import find_blocks, linear_suffixes


def linear_weights(model: PreTrainedModel | ModelSource) -> Iterator[tuple[int, Tensor]]:
    """Yield the weight matrix of each linear layer of the numbered layers.

    Of a model that is stored as safetensors, a matrix is read when its turn comes, and nothing
    else is: a 7B model takes the memory of its largest matrix. Where the files do not hold each
    matrix as it is in the model (other formats, fused or quantised weights), the model is loaded.

    Args:
        model: A loaded model, or where it comes from.

    Yields:
        The number of the layer, ascending from 0, and a weight [d_out, d_in] (of a `Conv1D` the
        transpose) in the dtype that it is stored in, on the device that it is on.

    Raises:
        ValueError: There is no such model, it has no numbered layers, or a weight is quantised.
    """
    if isinstance(model, PreTrainedModel):
        yield from _loaded(model)
        return
    meta = skeleton(model)
    places = _places(meta, _files(model))
    if places is None:
        yield from _loaded(load_model(model))
    else:
        yield from _stored(places)


def _loaded(model: PreTrainedModel) -> Iterator[tuple[int, Tensor]]:
    for layer, name, module in _linears(model):
        weight = module.weight
        assert isinstance(weight, Tensor)
        yield layer, _plain(weight.detach(), name)


def _linears(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield layer, name inside the list of blocks, and module of each linear layer."""
    _, blocks = find_blocks(model)
    suffixes = linear_suffixes(blocks)
    for layer, block in enumerate(blocks):
        modules = dict(block.named_modules())
        for suffix in suffixes:
            if suffix in modules:  # layers of a hybrid model differ
                yield layer, f"{layer}.{suffix}", modules[suffix]


def skeleton(source: ModelSource) -> PreTrainedModel:
    """Build the model without memory for its weights, to know its layers' names and shapes.

    Raises:
        ValueError: There is no such model.
    """
    config = load_config(source)
    with readable_errors(source), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, trust_remote_code=source.trust_remote_code
        )
    assert isinstance(model, PreTrainedModel)
    return model


def _files(source: ModelSource) -> list[Path]:
    """Find the model's safetensors files, on the hub or in its folder; empty if it has none."""
    path = source_path(source)
    arguments = {k: v for k, v in source_arguments(source).items() if k == "revision"}
    missing_is_none: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    with readable_errors(source):
        whole = cached_file(path, SAFE_WEIGHTS_NAME, **missing_is_none, **arguments)
        if whole is not None:
            return [Path(whole)]
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **missing_is_none, **arguments)
        if index is None:
            return []
        shards, _ = get_checkpoint_shard_files(  # type: ignore[no-untyped-call]
            path, index, **arguments
        )
    return [Path(shard) for shard in shards]


def _places(
    skeleton: PreTrainedModel, files: list[Path]
) -> list[tuple[int, str, Path, torch.Size]] | None:
    """Find each linear layer's weight in the files: layer, key, file and shape.

    Files may name a weight with another prefix than the model, so that the end of the name
    counts, from the list of blocks on. None if a weight is missing or its name is ambiguous.
    """
    from safetensors import safe_open

    held: dict[str, Path] = {}
    for path in files:
        with safe_open(path, "pt") as handle:
            held |= dict.fromkeys(handle.keys(), path)
    blocks = find_blocks(skeleton)[0].rsplit(".", 1)[-1]
    by_tail: dict[str, list[str]] = {}
    for key in held:
        start = f".{key}".find(f".{blocks}.")
        if start >= 0:
            by_tail.setdefault(key[start:], []).append(key)
    places = []
    for layer, name, module in _linears(skeleton):
        keys = by_tail.get(f"{blocks}.{name}.weight", [])
        weight = module.weight
        assert isinstance(weight, Tensor)
        if len(keys) != 1:
            return None
        places.append((layer, keys[0], held[keys[0]], weight.shape))
    return places


def _stored(places: list[tuple[int, str, Path, torch.Size]]) -> Iterator[tuple[int, Tensor]]:
    from safetensors import safe_open

    for layer, key, path, shape in places:
        with safe_open(path, "pt") as handle:
            weight = handle.get_tensor(key)
        if weight.shape != shape:
            raise ValueError(
                f"{path}: {key} has shape {list(weight.shape)}, expected {list(shape)}; "
                "quantised weights have no spectrum to speak of"
            )
        yield layer, _plain(weight, key)


def _plain(weight: Tensor, name: str) -> Tensor:
    if not weight.is_floating_point() or weight.dim() != 2:
        raise ValueError(
            f"the weight of {name} is a {weight.dtype} tensor of shape {list(weight.shape)}, "
            "expected a matrix of floating-point numbers; give the model before its quantisation"
        )
    return weight
