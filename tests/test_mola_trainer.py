"""Transformers' `Trainer` trains an adapter, as people do who have scripts of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from mola.config import MolaConfig
from mola.model import MolaModel, detach, get_mola_model, load_mola_model

IGNORED = -100
FIELDS = TrainingArguments.__dataclass_fields__  # Transformers 5 renames it on the way to 6
CHECKPOINTING = next(
    f for f in ("activation_checkpointing", "gradient_checkpointing") if f in FIELDS
)


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def tokenised(tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Rows of TRL's prompt-completion form, as its SFT trainer tokenises them."""
    rows = [{"prompt": f"next of {i}: ", "completion": f"{i + 1}."} for i in range(8)]

    def tokenise(row: dict[str, str]) -> dict[str, Any]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        return {
            "input_ids": prompt + completion,
            "attention_mask": [1] * (len(prompt) + len(completion)),
            "labels": [IGNORED] * len(prompt) + completion,
        }

    return Dataset.from_list([tokenise(row) for row in rows])


def trainer(
    model: MolaModel, tokenizer: PreTrainedTokenizerBase, folder: Path, **settings: Any
) -> Trainer:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
        **settings,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=tokenised(tokenizer),
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED),
    )


def attach(base: PreTrainedModel, coef: float = 0.0, variant: str = "per_router") -> MolaModel:
    config = MolaConfig(
        experts=(1, 0, 3, 5),
        r=2,
        lora_dropout=0.0,
        init_seed=0,
        router_aux_loss_coef=coef,
        router_aux_loss_variant=variant,
    )
    return get_mola_model(base, config)


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_lowers_the_loss_and_its_checkpoint_loads(
    tiny_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    checkpointing: bool,
) -> None:
    model = attach(tiny_model, coef=0.01)
    run = trainer(
        model, tokenizer, tmp_path, save_strategy="steps", save_steps=3,
        **{CHECKPOINTING: checkpointing},
    )  # fmt: skip
    run.train()
    history = losses(run)
    assert len(history) == 6
    assert history[-1] < 0.7 * history[0]
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
    checkpoint = tmp_path / "checkpoint-6"
    assert json.loads((checkpoint / "adapter_config.json").read_text())["experts"] == [1, 0, 3, 5]
    loaded = load_mola_model(detach(model), checkpoint)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, expected)


def test_trainer_goes_on_from_its_checkpoint(
    tiny_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = attach(tiny_model, coef=0.01)
    whole = trainer(model, tokenizer, tmp_path, save_strategy="steps", save_steps=3)
    whole.train()
    again = trainer(attach(detach(model), coef=0.01), tokenizer, tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(again)[-3:] == pytest.approx(losses(whole)[-3:], rel=1e-4)


def test_gradient_checkpointing_changes_no_step(
    tiny_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    histories = []
    base = tiny_model
    for checkpointing in (False, True):
        model = attach(base, coef=0.1)
        run = trainer(model, tokenizer, tmp_path, **{CHECKPOINTING: checkpointing})
        run.train()
        histories.append(losses(run))
        base = detach(model)
    assert histories[1] == pytest.approx(histories[0], rel=1e-4)


@pytest.mark.parametrize("variant", ["per_router", "pooled"])
def test_the_balance_loss_counts_once_whatever_the_accumulation(
    tiny_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, variant: str
) -> None:
    base = tiny_model
    parts = []
    for rows, accumulation in ((4, 1), (2, 2), (1, 4)):
        loss = []
        for coef in (0.0, 1.0):
            model = attach(base, coef, variant)
            run = trainer(
                model, tokenizer, tmp_path, max_steps=1, per_device_train_batch_size=rows,
                gradient_accumulation_steps=accumulation,
            )  # fmt: skip
            run.train()
            loss += losses(run)
            base = detach(model)
        parts.append(loss[1] - loss[0])
    layers = 2 if variant == "pooled" else 1
    assert all(layers <= part < 2 * layers for part in parts)  # not 4 times that, as it would be
    # smaller batches are a little less balanced, each by itself
    assert parts[1:] == pytest.approx([parts[0]] * 2, rel=0.2)


def test_labels_of_the_prompt_are_ignored(
    tiny_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = attach(tiny_model).eval()
    batch = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED)(
        [tokenised(tokenizer)[i] for i in range(3)]
    )
    with torch.no_grad():
        output = model(**batch)
    log_p = output.logits[:, :-1].log_softmax(-1)
    targets = batch["labels"][:, 1:]
    kept = targets != IGNORED
    picked = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0][kept]
    assert kept.sum() < targets.numel() / 2
    torch.testing.assert_close(output.loss, -picked.mean())
