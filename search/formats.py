"""Write an exported allocation in the forms that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mola.allocation import Allocation
from studies.export import LLAMA_MODULES
from studies.files import write_json_atomic, write_text_atomic

CONFIG_NAME = "adapter_config.json"  # PEFT's
FORMATS = ("json", "yaml", "python", "upstream", "peft")

_SNIPPET = '''\
"""Attach the adapter of trial {trial} of {study}: {total} experts over {layers} layers."""

from transformers import AutoModelForCausalLM

from mola import MolaConfig, get_mola_model
{imports}
model = AutoModelForCausalLM.from_pretrained({load})
config = MolaConfig(
    experts={experts},
    r={r},
    lora_alpha={lora_alpha},
    lora_dropout={lora_dropout},
    target_modules={target_modules},
    top_k={top_k},
    router_aux_loss_coef={router_aux_loss_coef},
)
model = get_mola_model(model, config, seed={seed})
model.print_trainable_parameters()
'''


def write(document: dict[str, Any], form: str, out: Path) -> None:
    """Write an allocation document.

    Args:
        document: see `studies.export.allocation_document`.
        form: one of FORMATS. `json` and `yaml` are the whole document; `python` is a program that
            attaches the adapter; `upstream` are arguments of the reference implementation; `peft`
            is a folder with the `adapter_config.json` of an adapter that is not trained yet.
        out: the file, or the folder of `peft`.

    Raises:
        ValueError: the form cannot express the adapter; says why.
        OSError: the file cannot be written; an older one is as it was.
    """
    if form == "json":
        write_json_atomic(out, document)
    elif form == "yaml":
        write_text_atomic(out, _yaml(document))
    elif form == "python":
        write_text_atomic(out, as_python(document))
    elif form == "upstream":
        write_text_atomic(out, _upstream(document))
    else:
        _write_peft(document, out)


def _yaml(document: dict[str, Any]) -> str:
    import json

    import yaml

    plain = json.loads(json.dumps(document, allow_nan=False))  # tuples as lists
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=None)
    return text


def as_python(document: dict[str, Any]) -> str:
    """Write a program; what comes from the document is written as Python literals."""
    origin = document["study"]
    source = origin["model"]
    if source["name"] is None:
        imports, load = "from mola.demo import MODEL_DIR\n", "MODEL_DIR"
    else:
        imports, load = "", repr(source["name"])
    if source["revision"] is not None:
        load += f", revision={source['revision']!r}"
    if source["dtype"] != "auto":
        load += f", dtype={source['dtype']!r}"
    modules = document["target_modules"]
    named = ("r", "lora_alpha", "lora_dropout", "top_k", "router_aux_loss_coef")
    return _SNIPPET.format(
        trial=origin["trial"],
        study=ascii(origin["name"]).replace("\\", "/").replace('"', "'"),
        total=document["total_experts"],
        layers=document["num_layers"],
        imports=imports,
        load=load,
        experts=repr(str(Allocation(document["experts_per_layer"]))),
        target_modules=None if modules is None else repr(list(modules)),
        seed=origin["seed"],
        **{name: repr(document[name]) for name in named},
    )


def _upstream(document: dict[str, Any]) -> str:
    """Write the reference implementation's arguments, or say what it has no words for."""
    arguments = document["upstream_args"]
    if arguments is None:
        raise ValueError(
            "--format upstream: the reference implementation puts at least one expert into each "
            "layer, and this allocation leaves layers without any; search with --min-experts 1"
        )
    odd = sorted(set(document["target_modules"] or ()) - set(LLAMA_MODULES))
    if odd:
        raise ValueError(
            f"--format upstream: the reference implementation adapts LLaMA's linear layers alone, "
            f"not {', '.join(odd)}"
        )
    if document["router_aux_loss_coef"]:
        raise ValueError(
            "--format upstream: the reference implementation has one balance loss, of coefficient "
            f"0.001 and over all routers of a layer together; this adapter was searched with "
            f"{document['router_aux_loss_coef']:g} for each router by itself"
        )
    return f"{arguments}\n"


def _write_peft(document: dict[str, Any], out: Path) -> None:
    """Write the configuration of a fresh adapter, whole or not at all."""
    import tempfile

    from mola import MolaConfig

    source, modules = document["study"]["model"], document["target_modules"]
    config = MolaConfig(
        experts=list(document["experts_per_layer"]),
        r=document["r"],
        lora_alpha=document["lora_alpha"],
        lora_dropout=document["lora_dropout"],
        target_modules=None if modules is None else list(modules),
        top_k=document["top_k"],
        router_aux_loss_coef=document["router_aux_loss_coef"],
        init_seed=document["study"]["seed"],
        base_model_name_or_path=source["name"],
        revision=source["revision"],
    )
    if out.is_file():
        raise ValueError(f"--format peft writes a folder, and {out} is a file")
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        text = (Path(scratch) / CONFIG_NAME).read_text(encoding="utf-8")
    write_text_atomic(out / CONFIG_NAME, text)
