"""Score the answers of a split under the model.

With choices, the objective is the mean over rows of -ln p(gold), where p is normalised over the
row's choices (nats per row), and a row is right if its gold choice is the likeliest. Without, it
is the negative log-likelihood per answer token (nats per output token), and a row is right if
every answer token is the likeliest one, which is what greedy decoding would get right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from mola.batching import answer_logits, collate
from mola.choices import answer_log_probs, share_a_prompt


@dataclass(frozen=True)
class Evaluation:
    """A split's scores.

    Attributes:
        objective: Nats per row (with choices) or per output token (without); lower is better.
        accuracy: Fraction of the rows that are right, 0 to 1.
        standard_error: Of `objective`, over the rows.
        rows: Rows evaluated.
    """

    objective: float
    accuracy: float
    standard_error: float
    rows: int


def evaluate(
    model: nn.Module, data: Dataset, *, accelerator: Accelerator, batch_tokens: int = 4096
) -> Evaluation:
    """Evaluate a tokenised split.

    Args:
        model: With or without an adapter; left in evaluation mode.
        data: One record per candidate answer, see `mola.data`.
        accelerator: The candidates are spread over its processes.
        batch_tokens: Tokens of a forward pass, padding included. Changes speed, not results.

    Raises:
        FloatingPointError: If a log-likelihood is not finite.
    """
    # DistributedDataParallel would wait for processes that have fewer batches
    model = getattr(model, "module", model)
    model.eval()
    records = list(data)
    # [candidates, 3]: log-likelihood, answer tokens, whether all of them are the likeliest
    scores = torch.zeros(len(records), 3, dtype=torch.float64)
    units = _units(records)
    lengths = [sum(len(records[i]["input_ids"]) for i in unit) for unit in units]
    batches = _by_length(lengths, batch_tokens)
    for batch in batches[accelerator.process_index :: accelerator.num_processes]:
        indices = [i for number in batch for i in units[number]]
        rows = [[records[i] for i in units[number]] for number in batch]
        with torch.inference_mode():
            scores[indices] = _score(model, rows, accelerator.device).cpu()
    scores = accelerator.reduce(scores.to(accelerator.device), reduction="sum").cpu()
    if not bool(scores.isfinite().all()):
        raise FloatingPointError("a log-likelihood of the evaluation is not finite")
    row_of = torch.tensor([record["row"] for record in records])
    is_gold = torch.tensor([record["is_gold"] for record in records])
    if len(records) > int(row_of.max()) + 1:
        return _over_choices(scores[:, 0], row_of, is_gold)
    return _over_tokens(scores)


def _units(records: list[Any]) -> list[list[int]]:
    """Group the candidates' indices by what is scored together: rows that share a prompt."""
    by_row: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        by_row.setdefault(record["row"], []).append(index)
    if all(share_a_prompt([records[i] for i in row]) for row in by_row.values()):
        return list(by_row.values())
    return [[index] for index in range(len(records))]


def _score(model: nn.Module, rows: list[list[Any]], device: torch.device) -> Tensor:
    """Score the candidates of some rows: [candidates, 3] as in `evaluate`, in float64."""
    shared = answer_log_probs(model, rows, device) if len(rows[0]) > 1 else None
    candidates = [record for row in rows for record in row]
    if shared is None:
        batch = collate(candidates, device)
        log_p = answer_logits(model, batch).log_softmax(dim=-1)
        picked = log_p.gather(1, batch.targets[:, None])[:, 0]  # [n]
        shared = picked, log_p.argmax(dim=-1) == batch.targets, batch.rows
    picked, likeliest, candidate = shared
    columns = [picked.double(), torch.ones_like(picked).double(), (~likeliest).double()]
    sums = torch.zeros(len(candidates), 3, dtype=torch.float64, device=picked.device)
    sums.index_add_(0, candidate, torch.stack(columns, dim=1))
    sums[:, 2] = (sums[:, 2] == 0).double()
    return sums


def _over_choices(log_p: Tensor, row_of: Tensor, is_gold: Tensor) -> Evaluation:
    rows = int(row_of.max()) + 1
    top = torch.full((rows,), -math.inf, dtype=torch.float64)
    top = top.scatter_reduce(0, row_of, log_p, reduce="amax")
    shifted = (log_p - top[row_of]).exp()
    total = top + torch.zeros(rows, dtype=torch.float64).index_add(0, row_of, shifted).log()
    gold = torch.zeros(rows, dtype=torch.float64).index_add(0, row_of[is_gold], log_p[is_gold])
    loss = total - gold  # [rows]
    # a tie between the gold choice and another is no hit
    best_other = torch.full((rows,), -math.inf, dtype=torch.float64)
    best_other = best_other.scatter_reduce(0, row_of[~is_gold], log_p[~is_gold], reduce="amax")
    error = float(loss.std()) / math.sqrt(rows) if rows > 1 else math.nan
    return Evaluation(float(loss.mean()), float((gold > best_other).double().mean()), error, rows)


def _over_tokens(scores: Tensor) -> Evaluation:
    loss, tokens = -scores[:, 0], scores[:, 1]
    objective = loss.sum() / tokens.sum()
    residual = loss - objective * tokens  # of the ratio estimator
    error = float(residual.square().sum().sqrt() / tokens.sum())
    return Evaluation(float(objective), float(scores[:, 2].mean()), error, len(scores))


def _by_length(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Group indices of similar length; each group's padded size is at most `batch_tokens`."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
