"""Share a tiny model, tokenizer and data sets, built here: no test needs a network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

os.environ["OMP_NUM_THREADS"] = "1"  # the models are tiny, and tests run beside each other
# A deadline would fail on a busy machine; pytest-timeout ends what hangs. On CI the examples are
# the same each time; elsewhere they are fresh ones, so that they find more over the days.
settings.register_profile("mola", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("mola")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of 4 layers and a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    symbols = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,  # large enough for an adapter to matter
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_model(tiny_model_dir: Path) -> PreTrainedModel:
    """The model of `tiny_model_dir`, frozen, with weights of its own."""
    from mola.base import load_model
    from mola.settings import ModelSource

    return load_model(ModelSource(str(tiny_model_dir)))


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="session")
def choices_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of two choices: which letter is doubled."""
    folder = tmp_path_factory.mktemp("choices")
    for split, start, count in (("train", 0, 32), ("validation", 32, 12), ("test", 44, 12)):
        rows: list[dict[str, object]] = [
            {
                "instruction": f"{i}: {'aab' if i % 3 else 'abb'}",
                "input": "",
                "output": "a" if i % 3 else "b",
                "choices": ["a", "b"],
            }
            for i in range(start, start + count)
        ]
        write_rows(folder / f"{split}.jsonl", rows)
    return folder


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a generative task, without choices and without a test split."""
    folder = tmp_path_factory.mktemp("text")
    for split, start, count in (("train", 0, 32), ("validation", 32, 12)):
        rows: list[dict[str, object]] = [
            {"instruction": f"next of {i}", "input": "", "output": str(i + 1)}
            for i in range(start, start + count)
        ]
        write_rows(folder / f"{split}.jsonl", rows)
    return folder
