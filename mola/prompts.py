"""Write the prompt of a row: Alpaca's template, the tokenizer's chat template or one's own."""

from __future__ import annotations

import string
import warnings
from typing import cast

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

CHAT = "chat"  # as prompt_template: the tokenizer's own chat template
# Source: the template without input of tatsu-lab/stanford_alpaca, which the MoLA reference uses.
ALPACA_TEMPLATE = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def check_template(prompt_template: str | None) -> None:
    """Check that a prompt template can be filled in.

    Args:
        prompt_template: None (Alpaca's template), "chat", or a text with `{instruction}` and
            perhaps `{input}`; other braces are doubled.

    Raises:
        ValueError: If it has other fields, no `{instruction}`, or braces that do not match.

    Warns:
        UserWarning: If it holds a backslash and an n where a line break may have been meant.
    """
    if prompt_template is None or prompt_template == CHAT:
        return
    name = f"prompt template {prompt_template!r}"
    try:
        parsed = list(string.Formatter().parse(prompt_template))
    except ValueError as error:
        raise ValueError(f"{name}: {error}; double the braces that are meant") from error
    fields = [field for _, field, _, _ in parsed if field is not None]
    unknown = [field for field in fields if field not in ("instruction", "input")]
    if unknown or any(spec or conversion for _, _, spec, conversion in parsed):
        wrong = ", ".join(f"{{{field}}}" for field in unknown) or "formatted ones"
        raise ValueError(
            f"{name}: the fields are {{instruction}} and {{input}}, not {wrong}; "
            "double the braces that are meant"
        )
    if "instruction" not in fields:
        raise ValueError(f"{name} has no {{instruction}}; write one that has, or use {CHAT!r}")
    if r"\n" in prompt_template and "\n" not in prompt_template:
        warnings.warn(
            f"{name} holds a backslash and an n, but no line break; "
            "if one was meant: $'...' makes it one in a shell",
            stacklevel=2,
        )


def render_prompts(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, prompt_template: str | None
) -> list[str]:
    """Fill in the template for each row.

    Where the template has no `{input}`, the input follows the instruction on a line of its own.

    Args:
        rows: Columns instruction and input.
        tokenizer: Has the chat template, if that is asked for.
        prompt_template: As in `check_template`.

    Raises:
        ValueError: If the template is wrong, or the tokenizer has no chat template that works.
    """
    check_template(prompt_template)
    columns = rows[:]
    pairs = list(zip(columns["instruction"], columns["input"], strict=True))
    if prompt_template is not None and "{input}" in prompt_template:
        return [prompt_template.format(instruction=i, input=x) for i, x in pairs]
    joined = ["\n".join(part for part in pair if part) for pair in pairs]
    if prompt_template == CHAT:
        return _apply_chat_template(tokenizer, joined)
    template = ALPACA_TEMPLATE if prompt_template is None else prompt_template
    return [template.format(instruction=text) for text in joined]


def _apply_chat_template(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[str]:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ValueError(f"prompt template {CHAT!r}: the tokenizer has no chat template")
    chats = [[{"role": "user", "content": text}] for text in texts]
    try:
        rendered = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"prompt template {CHAT!r}: the tokenizer's fails: {error}") from error
    return cast("list[str]", rendered)
