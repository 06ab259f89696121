"""Describe a study and its trials in Markdown, for the notes that the Optuna dashboard shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mola.allocation import Allocation
from studies.spec import StudySpec


def study_note(
    spec: StudySpec, conclusions: Sequence[str] = (), versions: Mapping[str, str] | None = None
) -> str:
    """Write a study's note: what is searched, what is known so far, how a trial is trained.

    Args:
        spec: What is searched.
        conclusions: Sentences, as far as there are any.
        versions: Of the packages, by name.
    """
    budget, train, adapter = spec.budget, spec.train, spec.adapter
    modules = ", ".join(adapter.target_modules or ()) or "all linear layers of the blocks"
    lines = [
        "# Expert allocation search (MoLA)",
        "",
        f"Which of the {spec.num_layers} layers deserve the {spec.total} experts? "
        f"The objective is the validation loss in {_safe(spec.objective)}: lower is better.",
        "",
        *(line for sentence in conclusions for line in (f"**{_safe(sentence)}**", "")),
        _item("budget", f"{spec.total} experts over {spec.num_layers} layers"),
        _item("experts in a layer", f"{_bound(budget.low)} to {_bound(budget.high)}"),
        _item("model", f"{spec.model_name} ({spec.model_fingerprint})"),
        _item("data", f"{spec.data} ({spec.data_fingerprint})"),
        _item("prompt template", spec.prompt_template or "the default"),
        _item("longest row", f"{spec.max_length} tokens"),
        _item("target modules", modules),
        _item(
            "expert",
            f"rank {adapter.r}, lora_alpha {adapter.lora_alpha:g}, "
            f"dropout {adapter.lora_dropout:g}, top_k {adapter.top_k}, "
            f"balance loss {adapter.router_aux_loss_coef:g}",
        ),
        _item(
            "a trial",
            f"{train.steps} steps of {train.batch_size} rows, "
            f"learning rate {train.learning_rate:g}, warm-up {train.warmup}",
        ),
        _item("evaluated on the way at steps", ", ".join(map(str, spec.rungs)) or "none"),
        _item("seed", spec.seed),
    ]
    if versions:
        lines.append(_item("versions", ", ".join(f"{k} {v}" for k, v in versions.items())))
    return "\n".join(lines) + "\n"


def trial_note(allocation: Allocation, label: str, seed: int | str, result: str) -> str:
    """Write a trial's note.

    Args:
        allocation: What was trained.
        label: Why, as in `TrialRecord`.
        seed: Of the trial.
        result: What came out, in a line.
    """
    lines = [
        _item("experts", allocation),
        _item("why", label),
        _item("seed", seed),
        _item("result", result),
    ]
    return "\n".join(lines) + "\n"


def _item(name: str, value: Any) -> str:
    return f"- **{name}**: {_safe(value)}"


def _safe(value: Any) -> str:
    """Write text that cannot turn into Markdown or HTML, some dashboards' versions rendering both.

    A character written as an entity is text to both of them.
    """
    text = " ".join(str(value).split())
    return re.sub(r"[^\w .,:/-]|_", lambda odd: f"&#{ord(odd[0])};", text)


def _bound(bound: int | tuple[int, ...]) -> str:
    return str(bound if isinstance(bound, int) else Allocation(bound))
