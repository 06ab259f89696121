"""Write a study's winner as allocation.json, and read allocations that people bring."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import optuna

from mola.allocation import Allocation
from mola.settings import AdapterSettings
from studies.allocation_file import FORMAT_VERSION, AllocationFile, Difference, Origin
from studies.provenance import versions
from studies.records import TrialRecord, get_conclusion, records, study_spec
from studies.strict import decode

# All linear layers of the only architecture that the reference implementation knows, LLaMA.
LLAMA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# What the origin takes from the spec as it is.
_FROM_SPEC = (
    "model",
    "model_fingerprint",
    "data",
    "data_fingerprint",
    "prompt_template",
    "max_length",
    "train",
    "seed",
)


def allocation_document(study: optuna.Study, winner: int | None = None) -> dict[str, Any]:
    """Describe an allocation of a study, with everything that it takes to train it.

    Args:
        study: The study.
        winner: Number of a complete trial; None is the winner that the search has named.

    Raises:
        ValueError: The search has not named a winner yet, or there is no such complete trial.
    """
    conclusion = get_conclusion(study)
    if winner is None:
        winner = conclusion["winner"] if conclusion else None
    if winner is None:
        raise ValueError(
            f"the study {study.study_name!r} has no winner yet: run the same search again to "
            "finish it, or choose a complete trial with --trial"
        )
    trial, same = _complete(study, winner)
    spec, adapter = study_spec(study), study_spec(study).adapter
    experts = trial.allocation.experts
    objectives = [r.objective for r in same if r.objective is not None]
    several = len(objectives) > 1
    document = AllocationFile(
        format_version=FORMAT_VERSION,
        base_model=spec.model_name,
        num_layers=len(experts),
        total_experts=sum(experts),
        experts_per_layer=experts,
        top_k=adapter.top_k,
        r=adapter.r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules=adapter.target_modules,
        router_aux_loss_coef=adapter.router_aux_loss_coef,
        study=Origin(
            name=study.study_name,
            trial=winner,
            objective=spec.objective,
            objective_mean=fmean(objectives),
            objective_standard_error=(
                stdev(objectives) / math.sqrt(len(objectives)) if several else None
            ),
            seeds=len(objectives),
            accuracy=fmean(r.accuracy for r in same if r.accuracy is not None),
            difference_to_uniform=_difference(conclusion, trial.allocation),
            **{name: getattr(spec, name) for name in _FROM_SPEC},
        ),
        versions=versions(),
        upstream_args=upstream_args(trial.allocation, adapter),
    )
    return dataclasses.asdict(document)


def upstream_args(allocation: Allocation, adapter: AdapterSettings) -> str | None:
    """Write the reference implementation's arguments, ready to paste; None where it has none.

    It sends each token to exactly `top_k` experts, so that a layer with fewer gets as many as it
    has; a layer without experts cannot be said.

    Source:
        https://github.com/GCYZSL/MoLA, README and mola_training.py.
    """
    experts = allocation.experts
    if min(experts) == 0:
        return None
    modules = adapter.target_modules or LLAMA_MODULES
    values = {
        "number_experts": ",".join(map(str, experts)),
        "top_k": ",".join(str(min(adapter.top_k, n)) for n in experts),
        "lora_r": ",".join([str(adapter.r)] * len(experts)),
        "lora_target_modules": ",".join(modules),
    }
    flags = [f'--{name} "{value}"' for name, value in values.items()]
    flags += [
        f"--lora_alpha {adapter.lora_alpha:g}",
        f"--lora_dropout {adapter.lora_dropout:g}",
    ]
    return " ".join(flags)


def read_allocation_file(path: Path) -> tuple[Allocation, dict[str, Any]]:
    """Read an allocation.json, or a text or JSON list of counts.

    Returns:
        The allocation, and the document as `allocation_document` made it: empty for a list.

    Raises:
        ValueError: The file cannot be read, or is none of these; names the file and the field.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
        if not text.startswith("{"):
            return Allocation.parse(text), {}
        document = json.loads(text)
        version_read = document.pop("format_version", None)
        if version_read != FORMAT_VERSION:
            raise ValueError(
                f"format_version is {version_read!r}, this version of mola-search reads "
                f"{FORMAT_VERSION}"
            )
        document = {"format_version": FORMAT_VERSION, **document}
        return _checked(decode(document, AllocationFile, "the allocation")), document
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: it is not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{path}: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _checked(file: AllocationFile) -> Allocation:
    """Refuse counts that contradict the file's own numbers."""
    allocation = Allocation(file.experts_per_layer)
    for name, said, counted in (
        ("num_layers", file.num_layers, allocation.num_layers),
        ("total_experts", file.total_experts, allocation.total),
    ):
        if said != counted:
            raise ValueError(f"{name} is {said}, but experts_per_layer has {counted}")
    return allocation


def _complete(study: optuna.Study, number: int) -> tuple[TrialRecord, list[TrialRecord]]:
    """Find a complete trial, and all complete ones of its allocation."""
    history = records(study)
    trial = next((r for r in history if r.number == number), None)
    if trial is None or trial.state != "COMPLETE":
        state = "does not exist" if trial is None else f"is {trial.state}"
        raise ValueError(
            f"trial {number} of the study {study.study_name!r} {state}; choose a complete one"
        )
    same = {r.seed: r for r in history if _is_like(r, trial)}
    return trial, list(same.values())


def _is_like(record: TrialRecord, trial: TrialRecord) -> bool:
    return record.state == "COMPLETE" and record.allocation == trial.allocation


def _difference(conclusion: dict[str, Any] | None, allocation: Allocation) -> Difference | None:
    """Find what the search concluded about an allocation."""
    if conclusion is None:
        return None
    for row in conclusion["table"]:
        if tuple(row["experts"]) == allocation.experts and row["difference"] is not None:
            return Difference(
                mean=row["difference"],
                low=row["low"],
                high=row["high"],
                confidence=conclusion["confidence"],
                seeds=len(conclusion["fresh_seeds"]),
            )
    return None
