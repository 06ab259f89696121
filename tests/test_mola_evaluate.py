"""Evaluation against one forward pass per candidate with the full logits."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import PreTrainedModel

from mola.base import load_model
from mola.batching import answer_logits, collate
from mola.evaluate import evaluate
from mola.settings import ModelSource


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> PreTrainedModel:
    return load_model(ModelSource(str(tiny_model_dir), dtype="float32")).double()


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def make_records(rows: int, choices: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    records = []
    for row in range(rows):
        prompt = [rng.randrange(3, 250) for _ in range(rng.randrange(2, 12))]
        for choice in range(choices):
            answer = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 4))] + [2]
            records.append(
                {
                    "row": row,
                    "choice": choice,
                    "is_gold": choice == row % choices,
                    "input_ids": prompt + answer,
                    "prompt_length": len(prompt),
                }
            )
    return records


def log_likelihood(model: PreTrainedModel, record: dict[str, Any]) -> tuple[float, bool]:
    ids = torch.tensor([record["input_ids"]])
    with torch.no_grad():
        log_p = model(input_ids=ids).logits[0].log_softmax(-1)
    total, right = 0.0, True
    for position in range(record["prompt_length"], ids.shape[1]):
        token = ids[0, position]
        total += log_p[position - 1, token].item()
        right &= bool(log_p[position - 1].argmax() == token)
    return total, right


def test_choices_are_normalised_over_the_row(
    model: PreTrainedModel, accelerator: Accelerator
) -> None:
    records = make_records(rows=7, choices=3)
    got = evaluate(model, Dataset.from_list(records), accelerator=accelerator)
    losses, hits = [], []
    for row in range(7):
        scores = [log_likelihood(model, r)[0] for r in records if r["row"] == row]
        top = max(scores)
        losses.append(top + math.log(sum(math.exp(s - top) for s in scores)) - scores[row % 3])
        hits.append(scores[row % 3] == top)
    mean = sum(losses) / 7
    assert got.objective == pytest.approx(mean, rel=1e-6)
    assert got.accuracy == pytest.approx(sum(hits) / 7)
    spread = math.sqrt(sum((v - mean) ** 2 for v in losses) / 6 / 7)
    assert got.standard_error == pytest.approx(spread, rel=1e-6)
    assert got.rows == 7


def test_without_choices_the_objective_is_per_output_token(
    model: PreTrainedModel, accelerator: Accelerator
) -> None:
    records = make_records(rows=7, choices=1)
    got = evaluate(model, Dataset.from_list(records), accelerator=accelerator)
    scored = [log_likelihood(model, r) for r in records]
    tokens = sum(len(r["input_ids"]) - r["prompt_length"] for r in records)
    assert got.objective == pytest.approx(-sum(s for s, _ in scored) / tokens, rel=1e-6)
    assert got.accuracy == pytest.approx(sum(right for _, right in scored) / 7)


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_the_batch_size_does_not_change_the_result(
    model: PreTrainedModel, accelerator: Accelerator, batch_tokens: int
) -> None:
    data = Dataset.from_list(make_records(rows=9, choices=2))
    expected = evaluate(model, data, accelerator=accelerator, batch_tokens=200)
    got = evaluate(model, data, accelerator=accelerator, batch_tokens=batch_tokens)
    assert got.objective == pytest.approx(expected.objective, rel=1e-6)
    assert got.accuracy == expected.accuracy


def test_a_likelihood_that_is_not_finite_is_an_error(
    model: PreTrainedModel, accelerator: Accelerator
) -> None:
    weight = model.get_input_embeddings().weight
    saved = weight.detach().clone()
    try:
        weight.data[:] = math.nan
        with pytest.raises(FloatingPointError, match="not finite"):
            evaluate(model, Dataset.from_list(make_records(3, 2)), accelerator=accelerator)
    finally:
        weight.data[:] = saved


def test_logits_are_computed_at_the_answer_tokens_alone(model: PreTrainedModel) -> None:
    records = make_records(rows=4, choices=1)
    batch = collate(records, "cpu")
    answers = sum(len(r["input_ids"]) - r["prompt_length"] for r in records)
    seen = []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda _m, arguments, _o: seen.append(tuple(arguments[0].shape[:-1]))
    )
    with torch.no_grad():
        logits = answer_logits(model, batch)
    handle.remove()
    assert seen == [(answers,)]
    assert logits.shape[0] == len(batch.targets) == len(batch.rows) == answers


def test_collate_marks_answers_and_padding() -> None:
    batch = collate(
        [
            {"input_ids": [5, 6, 7, 2], "prompt_length": 2},
            {"input_ids": [8, 2], "prompt_length": 1},
        ],
        "cpu",
    )
    assert batch.input_ids.tolist() == [[5, 6, 7, 2], [8, 2, 0, 0]]
    assert batch.targets.tolist() == [7, 2, 2]
    assert batch.rows.tolist() == [0, 0, 1]
    assert batch.real.tolist() == [[True] * 4, [True, True, False, False]]
