"""Score the candidate answers of a row with one pass over their common prompt.

Notation: R rows · C candidates of all rows · T prompt tokens · A answer tokens · V vocabulary.

The prompts are padded on the left, so that their keys and values end where every answer begins,
and are then shared by the row's candidates: a prompt is computed once, not once per candidate.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from mola.batching import head_at
from mola.model import tuner

Row = Sequence[Mapping[str, Any]]
"""The records of a row's candidates."""


def share_a_prompt(row: Row) -> bool:
    """Whether the candidates of a row have the same prompt, and there is more than one."""
    prompts = {tuple(r["input_ids"][: r["prompt_length"]]) for r in row}
    return len(row) > 1 and len(prompts) == 1


def answer_log_probs(
    model: nn.Module, rows: Sequence[Row], device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the log-probability of each answer token.

    Args:
        model: In evaluation mode.
        rows: Each with candidates that share a prompt.
        device: Of the model.

    Returns:
        Per answer token, [n]: its log-probability in float32, whether it is the likeliest, and its
        candidate. None if the model's cache cannot be shared.
    """
    row_of = torch.tensor([i for i, row in enumerate(rows) for _ in row], device=device)  # [C]
    answers = [list(r["input_ids"][r["prompt_length"] :]) for row in rows for r in row]
    prompts = [list(row[0]["input_ids"][: row[0]["prompt_length"]]) for row in rows]
    first, cache, prompt_mask = _read_prompts(model, prompts, device)
    if not all(isinstance(layer, DynamicLayer) for layer in cache.layers):
        return None
    width = max(len(answer) for answer in answers)
    ids = torch.tensor([a + [0] * (width - len(a)) for a in answers], device=device)  # [C, A]
    lengths = torch.tensor([len(answer) for answer in answers], device=device)
    real = torch.arange(width, device=device) < lengths[:, None]  # [C, A]
    log_p, likeliest = _pick(first.log_softmax(-1)[row_of], ids[:, 0])
    candidate = torch.arange(len(answers), device=device)
    if width == 1:
        return log_p, likeliest, candidate
    cache.batch_select_indices(row_of)
    mask = torch.cat([prompt_mask[row_of], real[:, :-1]], dim=1)
    positions = prompt_mask.sum(1)[row_of, None] + torch.arange(width - 1, device=device)
    with head_at(model, real[:, 1:]):
        logits = _forward(
            model,
            input_ids=ids[:, :-1],
            attention_mask=mask,
            position_ids=positions,
            token_mask=real[:, :-1],
            cache=cache,
        ).logits
    rest, rest_likeliest = _pick(logits.float().log_softmax(-1), ids[:, 1:][real[:, 1:]])
    return (
        torch.cat([log_p, rest]),
        torch.cat([likeliest, rest_likeliest]),
        torch.cat([candidate, real[:, 1:].nonzero()[:, 0]]),
    )


def _read_prompts(
    model: nn.Module, prompts: Sequence[list[int]], device: torch.device
) -> tuple[Tensor, Any, Tensor]:
    """Run the prompts; return the logits after each, [R, V], the cache, and the mask, [R, T]."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    mask = torch.arange(width, device=device) >= width - lengths[:, None]  # [R, T]
    last = torch.zeros_like(mask)
    last[:, -1] = True
    with head_at(model, last):
        output = _forward(
            model,
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            token_mask=mask,
        )
    # the name before Transformers 5.24 is `past_key_values`
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    return output.logits.float(), cache, mask


def _forward(model: nn.Module, **inputs: Any) -> Any:
    inner: Any = getattr(model, "module", model)
    if tuner(model) is None:
        inputs.pop("token_mask")
        base = inner
    else:
        base = inner.get_base_model()
    inputs["attention_mask"] = inputs["attention_mask"].long()
    known = inspect.signature(base.forward).parameters
    if "position_ids" not in known:
        inputs.pop("position_ids")
    if "cache" in inputs and "cache" not in known:  # the name before Transformers 5.24
        inputs["past_key_values"] = inputs.pop("cache")
    return model(use_cache=True, **inputs)


def _pick(log_p: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    picked = log_p.gather(-1, targets[:, None])[:, 0]
    return picked, log_p.argmax(-1) == targets
