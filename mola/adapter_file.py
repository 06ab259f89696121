"""Read a saved MoLA adapter, and check it before anything is built from it.

The files may come from anywhere. Weights are safetensors, which hold no code, and the numbers of
the configuration are compared with the shapes of the weights before memory is taken for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mola.config import MolaConfig
from mola.tuner import find_blocks, linear_suffixes


def read_adapter(folder: Path) -> tuple[MolaConfig, dict[str, Tensor]]:
    """Read an adapter that `save_pretrained` wrote.

    Raises:
        ValueError: If the folder holds no MoLA adapter, its format is newer than this code, a value
            is wrong, or the weights cannot be read or are no finite floating-point numbers.
    """
    config = read_adapter_config(folder)
    path = folder / SAFETENSORS_WEIGHTS_NAME
    try:
        weights = load_file(path)
    except Exception as error:
        raise ValueError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    for key, weight in weights.items():
        if not weight.is_floating_point():
            raise ValueError(f"{path}: {key:.80} holds {weight.dtype}, not floating-point numbers")
        if not weight.float().isfinite().all():
            raise ValueError(f"{path}: {key:.80} holds numbers that are not finite")
    return config, weights


def read_adapter_config(folder: Path) -> MolaConfig:
    """Read `adapter_config.json` of a MoLA adapter.

    Raises:
        ValueError: If there is none, or it is not MoLA's, a value is wrong, or a newer version
            wrote it.
    """
    path = folder / CONFIG_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no readable adapter configuration: {error}") from error
    kind = document.get("peft_type") if isinstance(document, dict) else None
    if kind != "MOLA":
        raise ValueError(f"{path}: peft_type is {kind!r}, expected 'MOLA'")
    known = MolaConfig.__dataclass_fields__
    try:
        config = MolaConfig(**{key: value for key, value in document.items() if key in known})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    unknown = sorted(set(document) - set(known))
    if unknown:
        raise ValueError(f"{path}: unknown keys {', '.join(unknown)}")
    return config


def contradiction(
    config: MolaConfig, weights: dict[str, Tensor], model: PreTrainedModel
) -> str | None:
    """Find a module whose experts in the configuration are not those of the weights.

    Done before the adapter is attached, so that no memory is taken for experts that do not exist.
    An allocation of another number of layers than the model's is left for the attachment to refuse.
    """
    for module, experts in _adapted_modules(config, model):
        key = f"base_model.model.{module}.lora_A.weight"
        expected = f"{experts} experts of rank {config.r} in adapter_config.json"
        if key not in weights:
            return f"missing weights, such as {key}, for {expected}"
        rows = weights[key].shape[0] if weights[key].dim() else 0
        if rows != experts * config.r:
            return f"weights of another shape: {key} has {rows} rows, not those of {expected}"
    return None


def _adapted_modules(config: MolaConfig, model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield the modules that PEFT will adapt, and their numbers of experts."""
    name, blocks = find_blocks(model)
    if len(config.experts) != len(blocks):
        return
    if config.target_modules in (None, "all-linear"):
        config = replace(config, target_modules=linear_suffixes(blocks))
    for key, module in blocks.named_modules(prefix=name):
        if isinstance(module, (nn.Linear, Conv1D)) and check_target_module_exists(config, key):
            experts = config.experts[int(key[len(name) + 1 :].split(".", 1)[0])]
            if experts > 0:
                yield key, experts
