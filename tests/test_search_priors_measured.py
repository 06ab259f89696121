"""Priors that are measured on the frozen model, and the process that measures them."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from mola.allocation import Allocation
from mola.base import load_model, load_tokenizer
from mola.batching import answer_logits, collate
from mola.data import TaskData, encode_splits, load_splits
from mola.model import get_mola_model
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from mola.trial import make_config
from search.priors import gradient, measure, representation
from search.priors.measure import MEASURED, Request, Row, rows_of


@pytest.fixture(scope="module")
def source(tiny_model_dir: Path) -> ModelSource:
    return ModelSource(str(tiny_model_dir))


@pytest.fixture
def model(source: ModelSource) -> PreTrainedModel:
    return load_model(source)


@pytest.fixture(scope="module")
def data(source: ModelSource, choices_dir: Path) -> TaskData:
    return encode_splits(
        load_splits(str(choices_dir)),
        load_tokenizer(source),
        prompt_template=None,
        max_length=256,
        name="choices",
    )


def nothing(_: int) -> None:
    """Stand in for a progress display."""


def records(data: TaskData, count: int) -> list[dict[str, Any]]:
    return [data.train[i] for i in range(count)]


def test_the_gradient_score_is_the_root_mean_square_of_the_gradients_of_b(
    model: PreTrainedModel, data: TaskData
) -> None:
    rows, adapter = records(data, 8), AdapterSettings(lora_dropout=0.5)
    found = gradient.scores(
        model, adapter, [rows[:4], rows[4:]], micro_batch=4, seed=3, progress=nothing
    )
    mola_model = get_mola_model(model, make_config(Allocation([1] * 4), adapter, 3)).eval()
    squares = [0.0] * 4
    for batch in (rows[:4], rows[4:]):
        padded = collate(batch, "cpu")
        loss = F.cross_entropy(answer_logits(mola_model, padded), padded.targets)
        names, parameters = zip(
            *[(n, p) for n, p in mola_model.named_parameters() if p.requires_grad], strict=True
        )
        for name, slope in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            if "lora_A" in name:
                assert slope.abs().max() == 0
            else:
                layer = int(name.split(".layers.")[1].split(".")[0])
                squares[layer] += float(slope.double().square().sum()) / 2
    assert found == pytest.approx([s**0.5 for s in squares], rel=1e-5)
    assert min(found) > 0


def test_micro_batches_leave_the_gradient_score_and_the_model_is_as_before(
    model: PreTrainedModel, data: TaskData
) -> None:
    before = {name: p.clone() for name, p in model.named_parameters()}
    rows, adapter = records(data, 4), AdapterSettings()
    whole = gradient.scores(model, adapter, [rows], micro_batch=4, seed=0, progress=nothing)
    split = gradient.scores(model, adapter, [rows], micro_batch=1, seed=0, progress=nothing)
    assert split == pytest.approx(whole, rel=1e-4)  # float32 sums in another order
    after = dict(model.named_parameters())
    assert set(after) == set(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_representation_score_is_the_mean_over_all_pairs(
    model: PreTrainedModel, data: TaskData
) -> None:
    prompts = [row["input_ids"][: row["prompt_length"]] for row in records(data, 19)]
    found = representation.scores(model, prompts, progress=nothing)
    states: list[list[torch.Tensor]] = [[] for _ in range(4)]
    for prompt in prompts:  # one by one, so that nothing is padded
        kept = model(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
        # the last of these is after the final norm, which the score leaves out
        for layer in range(3):
            states[layer].append(kept[layer + 1][0, -1].double())
    for layer in range(3):
        pairs = [1 - F.cosine_similarity(a, b, dim=0) for a, b in combinations(states[layer], 2)]
        assert found[layer] == pytest.approx(float(sum(pairs) / len(pairs)), rel=1e-4)
    assert len(found) == 4


def test_rows_that_look_alike_score_zero(model: PreTrainedModel) -> None:
    alike = representation.scores(model, [[5, 6, 7]] * 3, progress=nothing)
    assert alike == pytest.approx([0] * 4, abs=1e-6)
    with pytest.raises(ValueError, match="at least two rows"):
        representation.scores(model, [[5, 6, 7]], progress=nothing)


def test_the_rows_are_the_first_ones_of_the_trials_order(data: TaskData) -> None:
    from mola.train import batch_indices

    train = TrainSettings(batch_size=2)
    rows = rows_of("gradient", data, train, seed=5)
    assert len(rows) == 2 * gradient.BATCHES
    steps = [batch_indices(len(data.train), 2, step, 5) for step in range(gradient.BATCHES)]
    expected = [list(data.train[i]["input_ids"]) for step in steps for i in step]
    assert [list(row.input_ids) for row in rows] == expected
    assert len(rows_of("representation", data, train, seed=5)) == len(data.train)
    assert rows_of("alphalora", data, train, seed=5) == ()


@pytest.mark.parametrize("name", MEASURED)
def test_the_child_answers_with_a_score_per_layer(
    name: str,
    source: ModelSource,
    data: TaskData,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = TrainSettings(batch_size=4)
    request = Request(name, source, "cpu", train=train, rows=rows_of(name, data, train, 0))
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(dataclasses.asdict(request))))
    measure.main()
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer == {"scores": measure.compute(request, nothing)}
    assert len(answer["scores"]) == 4
    assert f"{name}: " in captured.err


def test_a_child_that_dies_is_one_line(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shutil.which("false")
    assert program is not None
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(ValueError, match="^alphalora: the process that measures it died with"):
        measure.measure(Request("alphalora", source), quiet=True)


def test_a_child_process_gives_the_scores_and_one_line_of_what_went_wrong(
    source: ModelSource, data: TaskData
) -> None:
    request = Request(
        "representation", source, "cpu", rows=rows_of("representation", data, TrainSettings(), 0)
    )
    assert measure.measure(request, quiet=True) == measure.compute(request, nothing)
    lonely = dataclasses.replace(request, rows=(Row((1, 2), 1),))
    with pytest.raises(ValueError, match="^representation: the representations of at"):
        measure.measure(lonely, quiet=True)
