"""Attach a MoLA adapter to a frozen model, detach it, save it and load it."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModelForCausalLM, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import CONFIG_NAME, AuxiliaryTrainingWrapper
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from mola.adapter_file import contradiction, read_adapter
from mola.base import load_model
from mola.config import MolaConfig
from mola.layer import MolaLayer
from mola.routing import RoutingRecord
from mola.settings import ModelSource
from mola.tuner import MolaTuner

MODEL_CARD = """---
base_model: {base_json}
library_name: peft
pipeline_tag: text-generation
tags: [mola, lora, mixture-of-experts]
---

# MoLA adapter

A mixture of LoRA experts for `{base}`: {total} experts of rank {r} (lora_alpha {alpha:g}), each
token routed to {top_k}. Experts per layer, `count x layers`, layer 0 first: `{allocation}`.

```python
from mola import load_mola_model

model = load_mola_model({base_json}, "path/to/this/folder")
```
"""


class MolaModel(PeftModelForCausalLM):
    """A `PeftModel` with a MoLA adapter, which saves atomically and without a network."""

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Write `adapter_config.json`, `adapter_model.safetensors` and a model card.

        Each file is written beside its place and moved there when whole, the weights before the
        configuration: a full disk leaves the previous adapter as it was.

        Args:
            save_directory: Folder of the adapter; made if missing.
            **kwargs: As in PEFT; embeddings are saved only if asked for.

        Raises:
            ValueError: If `safe_serialization=False` is asked for.
            OSError: If the files cannot be written; the previous adapter is as it was.
        """
        if not kwargs.pop("safe_serialization", True):
            raise ValueError("MoLA adapters are saved as safetensors only")
        kwargs.setdefault("save_embedding_layers", False)
        target = Path(save_directory)
        target.mkdir(parents=True, exist_ok=True)
        if not kwargs.get("is_main_process", True):
            return
        with tempfile.TemporaryDirectory(dir=target, prefix=".saving-") as scratch:
            try:
                super().save_pretrained(scratch, **kwargs)
            except SafetensorError as error:  # such as a full disk
                raise OSError(f"{target}: the adapter cannot be written: {error}") from error
            written = [p for p in Path(scratch).rglob("*") if p.is_file()]
            for path in sorted(written, key=lambda p: p.name == CONFIG_NAME):
                place = target / path.relative_to(scratch)
                place.parent.mkdir(parents=True, exist_ok=True)
                _sync(path)
                path.replace(place)

    def create_or_update_model_card(self, output_dir: str) -> None:
        """Write a short model card that says what the adapter is and how it is loaded."""
        config = self.active_peft_config
        assert isinstance(config, MolaConfig)
        base = config.base_model_name_or_path or "unknown"
        Path(output_dir, "README.md").write_text(
            MODEL_CARD.format(
                base=base,
                base_json=json.dumps(base),
                allocation=config.allocation,
                total=config.allocation.total,
                r=config.r,
                alpha=config.lora_alpha,
                top_k=config.top_k,
            ),
            encoding="utf-8",
        )


def get_mola_model(
    model: PreTrainedModel, config: MolaConfig, *, seed: int | None = None
) -> MolaModel:
    """Attach a fresh adapter to a model, in place. The output does not change yet.

    Args:
        model: A decoder-only model with numbered layers; its weights are frozen.
        config: The adapter's configuration; its `experts` has one number per layer.
        seed: Seed of the initial weights; None takes the configuration's `init_seed`.

    Raises:
        ValueError: If the allocation does not fit the model, or a target module cannot be adapted.
    """
    if seed is not None:
        config.init_seed = seed
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = model.name_or_path or None
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 asks Transformers 5 for a property that has a new name
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
            return MolaModel(model, config)
    except Exception:
        _take_off(model)
        raise


def detach(model: PeftModelForCausalLM) -> PreTrainedModel:
    """Take the adapter off and return the base model, bit for bit as it was.

    Unlike PEFT's `unload`, it leaves no trained copy of `modules_to_save` in the base model.
    """
    base = model.base_model
    assert isinstance(base, MolaTuner)
    assert isinstance(base.model, PreTrainedModel)
    _take_off(base.model)
    return base.model


def _take_off(model: nn.Module) -> None:
    """Put the modules that an adapter has wrapped, be it all or some, back into their places."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, MolaLayer):
                setattr(parent, name, child.base_layer)
            elif isinstance(child, AuxiliaryTrainingWrapper):
                setattr(parent, name, child.original_module)
    if hasattr(model, "peft_config"):
        del model.peft_config


def load_mola_model(
    model: PreTrainedModel | str | os.PathLike[str],
    adapter_dir: str | os.PathLike[str],
    *,
    is_trainable: bool = False,
) -> MolaModel:
    """Attach a saved adapter.

    Args:
        model: The base model, or the id or folder from which it is loaded (in float32).
        adapter_dir: Folder that `save_pretrained` wrote.
        is_trainable: Whether the adapter can be trained on.

    Raises:
        ValueError: If the folder holds no MoLA adapter, its format is newer than this code, or it
            does not fit the model: other layers, missing or unexpected weights, other shapes.
    """
    folder = Path(adapter_dir)
    config, weights = read_adapter(folder)
    if not isinstance(model, PreTrainedModel):
        model = load_model(ModelSource(os.fspath(model)))
    problem = contradiction(config, weights, model)
    if problem:
        raise ValueError(f"{folder}: {problem}")
    config.inference_mode = not is_trainable
    mola_model = get_mola_model(model, config)
    problems = _mismatches(mola_model, weights)
    if problems:
        detach(mola_model)
        raise ValueError(
            f"{folder}: the adapter does not fit {type(model).__name__}: {'; '.join(problems)}"
        )
    set_peft_model_state_dict(mola_model, weights)
    return mola_model.eval() if not is_trainable else mola_model


def _mismatches(model: MolaModel, weights: dict[str, Tensor]) -> list[str]:
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    problems = []
    for title, keys in (
        ("missing weights", sorted(set(expected) - set(weights))),
        ("unexpected weights", sorted(set(weights) - set(expected))),
    ):
        if keys:
            problems.append(f"{len(keys)} {title}, such as {keys[0]}")
    shapes = [k for k in expected if k in weights and expected[k].shape != weights[k].shape]
    if shapes:
        k = shapes[0]
        problems.append(
            f"{len(shapes)} weights of another shape, such as {k}: {tuple(weights[k].shape)}, "
            f"expected {tuple(expected[k].shape)}"
        )
    return problems


@contextmanager
def record_routing(model: PeftModelForCausalLM) -> Iterator[RoutingRecord]:
    """Record what the routers do during the forward passes inside the `with` block."""
    found = tuner(model)
    assert found is not None
    routing = found.routing
    routing.record = record = RoutingRecord()
    try:
        yield record
    finally:
        routing.record = None


def tuner(model: nn.Module) -> MolaTuner | None:
    """Return PEFT's tuner inside a model, `DistributedDataParallel` or not; None without MoLA."""
    inner = getattr(model, "module", model)
    found = getattr(inner, "base_model", None)
    return found if isinstance(found, MolaTuner) else None


def routing_statistics(record: RoutingRecord, allocation_length: int) -> dict[str, list[Any]]:
    """Sum up a record per layer, for the study.

    Args:
        record: From `record_routing`.
        allocation_length: Number of layers.

    Returns:
        `entropy`: per layer, mean router entropy relative to ln N (1 is uniform), None where
        nothing is routed; `load`: per layer, the experts' mean share of the tokens, descending
        within each module before the mean, so that it shows how uneven the load is.
    """
    entropy: list[list[float]] = [[] for _ in range(allocation_length)]
    load: list[list[list[float]]] = [[] for _ in range(allocation_length)]
    for key, values in record.modules().items():
        match = re.search(r"\.(\d+)\.", key)
        layer = int(match.group(1)) if match else 0
        entropy[layer].append(values["entropy"] / math.log(len(values["load"])))
        load[layer].append(sorted(values["load"], reverse=True))
    return {
        "entropy": [round(sum(e) / len(e), 4) if e else None for e in entropy],
        "load": [[round(sum(c) / len(c), 4) for c in zip(*rows, strict=True)] for rows in load],
    }


def _sync(path: Path) -> None:
    with path.open("rb+") as handle:
        os.fsync(handle.fileno())
