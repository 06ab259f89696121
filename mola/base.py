"""Load the frozen base model and its tokenizer, from the hub, a folder or the built-in model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mola.demo import MODEL_DIR
from mola.settings import ModelSource


def load_config(source: ModelSource) -> Any:
    """Load the model's configuration alone.

    Raises:
        ValueError: If there is no such model.
    """
    with readable_errors(source):
        return AutoConfig.from_pretrained(source_path(source), **source_arguments(source))


def num_layers(source: ModelSource) -> int:
    """Read the number of layers from the model's configuration, without its weights.

    Raises:
        ValueError: If there is no such model, or it is no decoder-only model with numbered layers.
    """
    config = load_config(source)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(config, "num_hidden_layers", None)
    if getattr(config, "is_encoder_decoder", False) or not layers:
        raise ValueError(
            f"model {source.display_name!r} ({config.model_type}) is no decoder-only model with "
            "numbered layers"
        )
    return int(layers)


def check_length(source: ModelSource, max_length: int) -> None:
    """Check that rows of some length fit into the model's context.

    Args:
        source: The model.
        max_length: In tokens.

    Raises:
        ValueError: If they do not.
    """
    config = load_config(source)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(config, "max_position_embeddings", None)
    if limit and max_length > limit:
        raise ValueError(f"--max-length {max_length}: the model's context is {limit} tokens")


def check_vocabulary(source: ModelSource, highest_token: int) -> None:
    """Check that the model has an embedding for each token of the data.

    Args:
        source: The model.
        highest_token: The largest token id.

    Raises:
        ValueError: If it has not: the tokenizer is another model's, or got tokens of its own.
    """
    config = load_config(source)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(config, "vocab_size", None)
    if size and highest_token >= size:
        raise ValueError(
            f"model {source.display_name!r}: its tokenizer gives the token {highest_token}, but "
            f"the model has {size}; the tokenizer is another model's, or has tokens of its own"
        )


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer.

    Raises:
        ValueError: If there is no such model, or it has no tokenizer.
    """
    with readable_errors(source):
        return AutoTokenizer.from_pretrained(source_path(source), **source_arguments(source))


def load_model(source: ModelSource, device: str | torch.device = "cpu") -> PreTrainedModel:
    """Load the base model, frozen and in evaluation mode.

    Args:
        source: What to load. `auto` as dtype is bfloat16 on a GPU that has it, else float32.
        device: Where the weights go; `auto` shards them over the visible GPUs.

    Raises:
        ValueError: If there is no such model, or it cannot be read.
    """
    place = {"device_map": "auto"} if device == "auto" else {}
    with readable_errors(source):
        model = AutoModelForCausalLM.from_pretrained(
            source_path(source),
            dtype=_dtype(source.dtype, device),
            **place,
            **source_arguments(source),
        )
    assert isinstance(model, PreTrainedModel)
    if not place:
        nn.Module.to(model, device)
    return nn.Module.eval(model.requires_grad_(False))


def checkpoint_activations(model: PreTrainedModel, enable: bool) -> None:
    """Switch gradient checkpointing, in the form that keeps adapters' gradients, on or off.

    Transformers 5 renamed it on the way to 6; both names are served.
    """
    if enable:
        switch = getattr(model, "activation_checkpointing_enable", None)
        (switch or model.gradient_checkpointing_enable)({"use_reentrant": False})
    else:
        switch = getattr(model, "activation_checkpointing_disable", None)
        (switch or model.gradient_checkpointing_disable)()
        model.disable_input_require_grads()  # type: ignore[no-untyped-call]


def model_fingerprint(source: ModelSource) -> str:
    """Return a short hash that changes when the model does.

    Of a folder: its configuration and tokenizer, and size and beginning of each file of weights.
    Of a hub model: the commit.

    Raises:
        ValueError: If there is no such model.
    """
    config = load_config(source)
    digest = hashlib.sha256()
    folder = Path(source_path(source))
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.suffix in {".json", ".safetensors", ".bin", ".model"} and path.is_file():
                digest.update(f"{path.name} {path.stat().st_size} ".encode())
                with path.open("rb") as handle:
                    digest.update(handle.read(1 << 20))
    else:
        commit = getattr(config, "_commit_hash", None)
        digest.update(json.dumps([source.name, commit]).encode())
    return digest.hexdigest()[:16]


def source_path(source: ModelSource) -> str:
    """Return the hub id or the folder that a model is loaded from."""
    return str(MODEL_DIR) if source.name is None else source.name


def source_arguments(source: ModelSource) -> dict[str, Any]:
    """Return what Transformers' loaders need to know beside the path."""
    arguments: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    if source.revision is not None:
        arguments["revision"] = source.revision
    return arguments


def _dtype(name: str, device: str | torch.device) -> torch.dtype:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    on_gpu = torch.device("cuda" if device == "auto" else device).type == "cuda"
    if on_gpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return torch.float32


@contextmanager
def readable_errors(source: ModelSource) -> Iterator[None]:
    """Turn whatever a failed load raises into one line that says which model and why."""
    try:
        yield
    except Exception as error:
        name = source.name
        if name is not None and not Path(name).exists():
            if Path(name).is_absolute() or name.startswith("."):
                raise ValueError(f"model {name!r}: no such folder") from error
            hint = "no such folder here, and it cannot be had from the Hugging Face hub"
        else:
            hint = "it is there, but cannot be loaded"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"model {source.display_name!r}: {hint} ({reason})") from error
