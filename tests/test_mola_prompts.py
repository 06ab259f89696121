from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mola.prompts import ALPACA_TEMPLATE, check_template, render_prompts

ROWS = Dataset.from_dict({"instruction": ["Add {1} and 2.", "Go on."], "input": ["x\ny", ""]})


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def test_the_default_is_alpaca_with_the_input_below_the_instruction(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    start = (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\n"
    )
    assert render_prompts(ROWS, tokenizer, None) == [
        start + "Add {1} and 2.\nx\ny\n\n### Response:\n",
        start + "Go on.\n\n### Response:\n",
    ]
    assert render_prompts(ROWS, tokenizer, ALPACA_TEMPLATE) == render_prompts(ROWS, tokenizer, None)


def test_a_template_of_ones_own_is_filled_in(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{{Q}} {instruction}|{input}\nA: "
    assert render_prompts(ROWS, tokenizer, template) == [
        "{Q} Add {1} and 2.|x\ny\nA: ",
        "{Q} Go on.|\nA: ",
    ]


def test_chat_is_the_tokenizers_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    assert render_prompts(ROWS, tokenizer, "chat") == [
        "<s>[user] Add {1} and 2.\nx\ny\n[assistant] ",
        "<s>[user] Go on.\n[assistant] ",
    ]


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [(None, "has no chat template"), ("{{ raise_exception('no users') }}", "fails: no users")],
)
def test_a_chat_template_that_cannot_be_used_is_refused(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, message: str
) -> None:
    tokenizer.chat_template = chat_template
    with pytest.raises(ValueError, match=message):
        render_prompts(ROWS, tokenizer, "chat")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{instruction} {question}", r"not \{question\}"),
        ("{instruction} {}", r"not \{\}"),
        ("{instruction.__class__}", r"not \{instruction.__class__\}"),
        ("{instruction[0]}", r"not \{instruction\[0\]\}"),
        ("{instruction!r}", "not formatted ones"),
        ("{instruction:>{input}}", "not formatted ones"),
        ("{instruction", "double the braces"),
        ("{instruction} }", "double the braces"),
        ("{input}", r"has no \{instruction\}"),
        ("alpaca", r"has no \{instruction\}"),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_template(template)


def test_a_backslash_n_where_a_line_break_was_meant_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="holds a backslash and an n"):
        check_template(r"{instruction}\nAnswer: ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_template("{instruction}\nAnswer, not \\n: ")
