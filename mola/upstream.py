"""Exchange adapters with MoLA's reference implementation.

    python -m mola.upstream THEIRS OURS      or the other way round: it sees which it is

Theirs has a tensor per expert: `M.lora_A_e.weight` [r, d_in] and `M.lora_B_e.weight` [d_out, r] for
expert e of the module M, and `M.router.router.weight` [N, d_in]. Its configuration is one of PEFT's
LoRA with a rank per layer; it says neither how many experts a layer has, which follows from the
tensors, nor its `top_k`, which must be known. A router that has one expert to choose has no effect:
it is left out here, and written as zeros there.

Source: https://github.com/GCYZSL/MoLA, `get_peft_model_state_dict_moe` and `Linear_MoE`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from torch import Tensor

from mola.adapter_file import read_adapter
from mola.config import MolaConfig

_KEY = re.compile(
    r"(?P<module>.+\.(?P<layer>\d{1,4})\..+)\."
    r"(?:lora_(?P<side>[AB])_(?P<e>\d{1,4})|router\.router)\.weight",
    re.ASCII,
)


def load_upstream_adapter(folder: Path, *, top_k: int = 2) -> tuple[MolaConfig, dict[str, Tensor]]:
    """Read an adapter of the reference implementation.

    Args:
        folder: What its training has written in the end: `adapter_config.json` and
            `adapter_model.bin`, which is read without running code that it may hold.
        top_k: Experts that a token is sent to, as it was trained with; fewer where there are fewer.

    Returns:
        The configuration, and the weights in this project's form, in float32.

    Raises:
        ValueError: If the files cannot be read, or hold what has no place in a MoLA adapter here:
            ranks that differ, biases, further modules, missing or surplus tensors.
    """
    document = _read_json(folder / CONFIG_NAME)
    if document.get("peft_type") != "LORA":
        kind = document.get("peft_type")
        raise ValueError(f"{folder / CONFIG_NAME}: peft_type is {kind!r}, expected 'LORA'")
    for name in ("modules_to_save", "layers_to_transform"):
        if document.get(name):
            raise ValueError(f"{folder / CONFIG_NAME}: {name} is set, which cannot be taken over")
    if document.get("bias", "none") != "none":
        raise ValueError(f"{folder / CONFIG_NAME}: trained biases cannot be taken over")
    path, tensors = _read_weights(folder)
    try:
        modules = _sorted_out(tensors)
        experts, targets = _allocation(modules)
        config = MolaConfig(
            experts=experts,
            r=_rank(document.get("r"), modules),
            lora_alpha=document.get("lora_alpha", 8),  # PEFT 0.4's default
            lora_dropout=document.get("lora_dropout", 0.0),
            target_modules=targets,
            top_k=top_k,
            base_model_name_or_path=document.get("base_model_name_or_path"),
            inference_mode=True,
        )
        return config, dict(_stacked(modules, config.r))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def convert(source: Path, target: Path, *, top_k: int = 2) -> str:
    """Write an adapter of the reference implementation in this project's form, or the reverse.

    Args:
        source: Folder with either.
        target: Folder to make; must not exist, or be empty.
        top_k: As for `load_upstream_adapter`; an adapter of this project knows its own.

    Returns:
        What was written, in a line.

    Raises:
        ValueError: If the source cannot be read or taken over, or the target holds files.
        OSError: If the target cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: it exists already; name a new folder")
    ours = _read_json(source / CONFIG_NAME).get("peft_type") == "MOLA"
    config, weights = read_adapter(source) if ours else load_upstream_adapter(source, top_k=top_k)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        made = Path(scratch, "adapter")
        made.mkdir()
        if ours:
            torch.save(dict(_unstacked(config, weights)), made / WEIGHTS_NAME)
            targets = _last_names(_modules(weights))
            text = json.dumps(_upstream_config(config, targets), indent=2)
            (made / CONFIG_NAME).write_text(text, encoding="utf-8")
        else:
            save_file(weights, made / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
            config.save_pretrained(str(made))
        if target.exists():
            target.rmdir()
        made.rename(target)
    form = "the reference implementation's" if ours else "this project's"
    return f"{target}: {config.allocation.total} experts, {config.allocation}, in {form} form"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as those of all commands."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _Parser(
        prog="python -m mola.upstream",
        description="Convert an adapter of MoLA's reference implementation (GCYZSL/MoLA) into one "
        "of this project, or the other way round.",
    )
    parser.add_argument("source", type=Path, help="folder of the adapter, in either form")
    parser.add_argument("target", type=Path, help="folder to make, in the other form")
    parser.add_argument(
        "--top-k",
        type=int,
        default=2,
        metavar="K",
        help="experts that a token is sent to, which the reference's files do not say (default 2)",
    )
    try:
        options = parser.parse_args(arguments)
        sys.stdout.write(convert(options.source, options.target, top_k=options.top_k) + "\n")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"Error: {' '.join(str(error).split())}\n")
        return 2
    return 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no readable adapter configuration: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected an object, not {type(document).__name__}")
    return document


def _read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    path = folder / WEIGHTS_NAME
    if not path.exists() and (folder / SAFETENSORS_WEIGHTS_NAME).exists():
        path = folder / SAFETENSORS_WEIGHTS_NAME
    try:
        if path.suffix == ".safetensors":
            return path, load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path}: cannot be read: {reason}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in tensors.items()
    ):
        raise ValueError(f"{path}: expected a dictionary of tensors")
    return path, tensors


def _sorted_out(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Sort tensors by module, and name them `A0`, `B0`, `A1`, ... and `router` there."""
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or tensor.dim() != 2 or not tensor.is_floating_point():
            raise ValueError(f"{key} is no weight of an expert or a router")
        name = "router" if match["side"] is None else f"{match['side']}{int(match['e'])}"
        modules.setdefault(match["module"], {})[name] = tensor.float()
    if not modules:
        raise ValueError("it holds no experts")
    for module, parts in modules.items():
        N = sum(name.startswith("A") for name in parts)
        expected = {"router", *(f"{side}{e}" for side in "AB" for e in range(N))}
        wrong = sorted(expected ^ set(parts))
        if wrong or parts["router"].shape[0] != N:
            detail = f"missing or surplus: {', '.join(wrong[:4])}" if wrong else "another router"
            raise ValueError(f"{module} has no whole set of experts ({detail})")
        if len({t.shape[1] for name, t in parts.items() if name[0] != "B"}) != 1 or (
            len({t.shape[0] for name, t in parts.items() if name[0] == "B"}) != 1
        ):
            raise ValueError(f"{module} has experts of different widths")
    return modules


def _layer(module: str) -> int:
    match = re.search(r"\.(\d{1,4})\.", module, re.ASCII)
    if match is None:
        raise ValueError(f"{module} is in no numbered layer")
    return int(match[1])


def _allocation(modules: dict[str, dict[str, Tensor]]) -> tuple[tuple[int, ...], list[str]]:
    """Read the experts per layer and the names of the adapted modules."""
    counts: dict[int, int] = {}
    for module, parts in modules.items():
        N = parts["router"].shape[0]
        if counts.setdefault(_layer(module), N) != N:
            raise ValueError(f"{module} has {N} experts, other modules of its layer have not")
    if set(counts) != set(range(len(counts))):
        missing = min(set(range(max(counts) + 1)) - set(counts))
        raise ValueError(f"layer {missing} has no experts, which the reference does not allow")
    return tuple(counts[layer] for layer in range(len(counts))), _last_names(modules)


def _last_names(modules: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(module.rsplit(".", 1)[1] for module in modules))


def _rank(said: object, modules: dict[str, dict[str, Tensor]]) -> int:
    """Read the rank, which has to be the same everywhere, and as the configuration says."""
    ranks = {
        tensor.shape["AB".index(name[0])]
        for parts in modules.values()
        for name, tensor in parts.items()
        if name != "router"
    }
    if len(ranks) != 1:
        raise ValueError(f"the experts have ranks {sorted(ranks)}; here all have the same")
    layers, r = len({_layer(module) for module in modules}), ranks.pop()
    if not isinstance(said, list) or said[:layers] != [r] * layers:
        raise ValueError(f"{CONFIG_NAME} says r={said!r}, but {layers} layers have rank {r}")
    return r


def _stacked(modules: dict[str, dict[str, Tensor]], r: int) -> Iterator[tuple[str, Tensor]]:
    for module, parts in modules.items():
        N = parts["router"].shape[0]
        yield f"{module}.lora_A.weight", torch.cat([parts[f"A{e}"] for e in range(N)])
        yield f"{module}.lora_B.weight", torch.cat([parts[f"B{e}"] for e in range(N)], dim=1)
        if N > 1:
            yield f"{module}.lora_router.weight", parts["router"].contiguous()


def _unstacked(config: MolaConfig, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the reference's tensors of an adapter.

    Raises:
        ValueError: If it has what the reference has not.
    """
    if min(config.experts) == 0:
        raise ValueError(
            f"the reference implementation has no layers without experts, as in {config.allocation}"
        )
    if config.modules_to_save:
        raise ValueError("modules_to_save cannot be taken over into the reference's form")
    for module in _modules(weights):
        layer, A = _layer(module), weights[f"{module}.lora_A.weight"]
        B = weights.get(f"{module}.lora_B.weight", A.new_empty(0))
        if layer >= len(config.experts):
            raise ValueError(f"{module}: adapter_config.json has {len(config.experts)} layers")
        N = config.experts[layer]
        if A.dim() != 2 or B.dim() != 2 or (A.shape[0], B.shape[1]) != (N * config.r, N * config.r):
            raise ValueError(f"{module} has no {N} experts of rank {config.r}")
        for e, (a, b) in enumerate(zip(A.chunk(N), B.chunk(N, dim=1), strict=True)):
            yield f"{module}.lora_A_{e}.weight", a.clone()
            yield f"{module}.lora_B_{e}.weight", b.clone()
        idle = torch.zeros(1, A.shape[1])
        yield f"{module}.router.router.weight", weights.get(f"{module}.lora_router.weight", idle)


def _modules(weights: dict[str, Tensor]) -> list[str]:
    end = ".lora_A.weight"
    return [key.removesuffix(end) for key in weights if key.endswith(end)]


def _upstream_config(config: MolaConfig, targets: list[str]) -> dict[str, Any]:
    """Describe an adapter in the form of PEFT 0.4's LoRA, which the reference uses."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model_name_or_path,
        "inference_mode": True,
        "r": [config.r] * len(config.experts),
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


if __name__ == "__main__":
    raise SystemExit(main())
