"""Read a saved MoLA adapter, and check it before anything is built from it.

The files may come from anywhere. Weights are safetensors, which hold no code, and the numbers of
the configuration are compared with the shapes of the weights before memory is taken for them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from mola.config import MolaConfig


def read_adapter(folder: Path) -> tuple[MolaConfig, dict[str, Tensor]]:
    """Read an adapter that `save_pretrained` wrote.

    Raises:
        ValueError: If the folder holds no MoLA adapter, its format is newer than this code, a value
            is wrong, or the weights cannot be read or are not as many as the configuration says.
    """
    config = read_adapter_config(folder)
    path = folder / SAFETENSORS_WEIGHTS_NAME
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {k: tuple(file.get_slice(k).get_shape()) for k in file.keys()}  # noqa: SIM118
        weights = load_file(path)
    except Exception as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    problem = _contradiction(config, shapes)
    if problem:
        raise ValueError(f"{path}: {problem}")
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


def _contradiction(config: MolaConfig, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Find a layer whose experts in the configuration are not those of the weights."""
    rows: dict[int, tuple[str, int]] = {}
    for key, shape in shapes.items():
        layer = re.search(r"\.(\d+)\..*\.lora_A\.weight$", key)
        if layer and shape:
            rows[int(layer[1])] = key, shape[0]
    for number, experts in enumerate(config.experts):
        key, found = rows.get(number, ("", 0))
        if found == experts * config.r:
            continue
        expected = f"{experts} experts of rank {config.r} in layer {number}"
        if not key:
            return f"missing weights: adapter_config.json has {expected}, the file has none"
        if experts == 0:
            return f"unexpected weights: adapter_config.json has {expected}, the file has {key}"
        return (
            f"weights of another shape: adapter_config.json has {expected}, but {key} has {found} "
            f"rows, not {experts * config.r}"
        )
    return None
