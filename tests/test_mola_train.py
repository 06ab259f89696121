"""The training path: what is a function of the seed, and what must not change the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import PreTrainedModel

from mola.allocation import Allocation
from mola.base import load_model, load_tokenizer
from mola.data import TaskData, encode_splits, load_splits
from mola.events import Event, Finished, Rung, Step
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from mola.train import batch_indices, learning_rate
from mola.trial import run_trial

SETTINGS = TrainSettings(steps=4, batch_size=4, learning_rate=1e-2)
ALLOCATION = Allocation((1, 0, 3, 4))


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> PreTrainedModel:
    return load_model(ModelSource(str(tiny_model_dir)))


@pytest.fixture(scope="module")
def task(tiny_model_dir: Path, choices_dir: Path) -> TaskData:
    return encode_splits(
        load_splits(str(choices_dir)),
        load_tokenizer(ModelSource(str(tiny_model_dir))),
        prompt_template="{instruction}",
        max_length=64,
        name="choices",
    )


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def run(
    model: PreTrainedModel,
    task: TaskData,
    accelerator: Accelerator,
    train: TrainSettings = SETTINGS,
    adapter: AdapterSettings | None = None,
    **arguments: Any,
) -> list[Event]:
    arguments = {"seed": 0, "rungs": (), **arguments}
    adapter = adapter or AdapterSettings(r=2, lora_alpha=4)
    return list(
        run_trial(model, task, ALLOCATION, adapter, train, accelerator=accelerator, **arguments)
    )


def timeless(events: list[Event]) -> list[Any]:
    return [
        (e.step, e.objective, e.accuracy, e.routing) if isinstance(e, Finished) else e
        for e in events
    ]


def test_a_trial_reports_steps_rungs_and_a_result(
    model: PreTrainedModel, task: TaskData, accelerator: Accelerator
) -> None:
    events = run(model, task, accelerator, rungs=(2, 4))
    assert [type(e) for e in events] == [Step, Step, Rung, Step, Step, Finished]
    assert [e.step for e in events] == [1, 2, 2, 3, 4, 4]
    assert events[-1].train_seconds > 0 and events[-1].eval_seconds > 0


def test_the_same_seed_gives_the_same_trial_bit_for_bit(
    model: PreTrainedModel, task: TaskData, accelerator: Accelerator
) -> None:
    first = run(model, task, accelerator)
    run(model, task, accelerator, seed=1)
    assert timeless(run(model, task, accelerator)) == timeless(first)


def test_rungs_do_not_change_the_training(
    model: PreTrainedModel, task: TaskData, accelerator: Accelerator
) -> None:
    with_rungs = run(model, task, accelerator, rungs=(1, 2, 3))
    assert timeless(with_rungs)[-1] == timeless(run(model, task, accelerator))[-1]


def test_training_lowers_the_loss(
    model: PreTrainedModel, task: TaskData, accelerator: Accelerator
) -> None:
    losses = [
        e.loss
        for e in run(model, task, accelerator, TrainSettings(steps=30, learning_rate=2e-2))
        if isinstance(e, Step)
    ]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_gradient_accumulation_equals_the_whole_batch(
    model: PreTrainedModel, task: TaskData, accelerator: Accelerator, micro_batch: int
) -> None:
    plain = AdapterSettings(r=2, lora_alpha=4, lora_dropout=0.0)
    whole = run(model, task, accelerator, adapter=plain)
    train = TrainSettings(**{**SETTINGS.__dict__, "micro_batch": micro_batch})
    pieces = run(model, task, accelerator, train, plain)
    for a, b in zip(whole, pieces, strict=True):
        if isinstance(a, Step) and isinstance(b, Step):
            assert a.loss == pytest.approx(b.loss, rel=1e-4)


def test_gradient_checkpointing_equals_none(
    model: PreTrainedModel, task: TaskData, accelerator: Accelerator
) -> None:
    plain = AdapterSettings(r=2, lora_alpha=4, lora_dropout=0.0, router_aux_loss_coef=0.1)
    train = TrainSettings(**{**SETTINGS.__dict__, "gradient_checkpointing": True})
    without = run(model, task, accelerator, adapter=plain)
    with_it = run(model, task, accelerator, train, plain)
    for a, b in zip(without, with_it, strict=True):
        if isinstance(a, Step) and isinstance(b, Step):
            assert a.loss == pytest.approx(b.loss, rel=1e-4)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


def test_a_closed_trial_leaves_the_base_model_as_it_was(
    model: PreTrainedModel, task: TaskData, accelerator: Accelerator
) -> None:
    names = [name for name, _ in model.named_parameters()]
    trial = run_trial(
        model, task, ALLOCATION, AdapterSettings(), SETTINGS, seed=0, accelerator=accelerator
    )
    next(trial)
    assert [name for name, _ in model.named_parameters()] != names
    trial.close()  # type: ignore[attr-defined]
    assert [name for name, _ in model.named_parameters()] == names
    assert not model.training


def test_a_loss_that_is_not_finite_ends_the_trial(
    model: PreTrainedModel, task: TaskData, accelerator: Accelerator
) -> None:
    # one huge step, and the next loss overflows
    wild = TrainSettings(steps=9, batch_size=4, learning_rate=1e30, max_grad_norm=1e30)
    with pytest.raises(FloatingPointError, match=r"not finite|training loss is"):
        run(model, task, accelerator, wild)
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_every_expert_that_was_trained_moved(
    model: PreTrainedModel, task: TaskData, accelerator: Accelerator
) -> None:
    trial = run_trial(
        model, task, ALLOCATION, AdapterSettings(r=2), SETTINGS, seed=0, accelerator=accelerator
    )
    for event in trial:
        if event.step == SETTINGS.steps:
            break
    moved = [p.any().item() for n, p in model.named_parameters() if "lora_B" in n]
    assert len(moved) == 3 * 7
    assert all(moved)
    trial.close()  # type: ignore[attr-defined]


def test_an_epoch_shows_each_row_once_and_seeds_differ() -> None:
    rows = [i for step in range(5) for i in batch_indices(10, 4, step, seed=3)]
    assert sorted(rows[:10]) == list(range(10))
    assert sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
    assert batch_indices(100, 8, 0, seed=3) != batch_indices(100, 8, 0, seed=4)


def test_a_batch_larger_than_the_data_repeats_rows() -> None:
    rows = batch_indices(3, 7, 0, seed=0)
    assert len(rows) == 7
    assert sorted(rows[:3]) == [0, 1, 2]


def test_learning_rate_warms_up_and_decays() -> None:
    settings = TrainSettings(steps=20, warmup_steps=4, learning_rate=1.0)
    rates = [learning_rate(step, settings) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 16)


def test_dataset_is_a_plain_table(task: TaskData) -> None:
    assert isinstance(task.train, Dataset)
    assert torch.tensor(task.train[0]["input_ids"]).dim() == 1
