"""Describe a study in Markdown, for the note that the Optuna dashboard shows."""

from __future__ import annotations

import re
from typing import Any

from mola.allocation import Allocation
from studies.spec import StudySpec


def study_note(spec: StudySpec) -> str:
    """Write the note: what is searched, on which model and data, and how a trial is trained."""
    budget, train, adapter = spec.budget, spec.train, spec.adapter
    modules = ", ".join(adapter.target_modules or ()) or "all linear layers of the blocks"
    lines = [
        "# Expert allocation search (MoLA)",
        "",
        f"Which of the {spec.num_layers} layers deserve the {spec.total} experts? "
        f"The objective is the validation loss in {spec.objective}: lower is better.",
        "",
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
    return "\n".join(lines) + "\n"


def _item(name: str, value: Any) -> str:
    """Write a list item whose value cannot turn into Markdown or HTML: the dashboard renders both.

    A character written as an entity is text to both of them.
    """
    text = " ".join(str(value).split())
    safe = re.sub(r"[^\w .,:/-]", lambda odd: f"&#{ord(odd[0])};", text)
    return f"- {name}: <code>{safe}</code>"


def _bound(bound: int | tuple[int, ...]) -> str:
    return str(bound if isinstance(bound, int) else Allocation(bound))
