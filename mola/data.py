"""Turn rows into token ids: the boundary between prompt and answer, the end token, the cut.

Where the prompt ends and the answer begins is decided on token ids. The prompt alone and the
prompt followed by each candidate answer are tokenised; what all of them begin with is the prompt,
the rest of each is its answer. So every text has the tokens that the tokenizer gives it as a whole,
the candidates of a row share their prompt, and a token that spans the boundary (where the template
ends in a space, say, which belongs to the answer's first word) is the answer's.

Source: lm-evaluation-harness moves a prompt's trailing spaces to the answer for the same reason
(`lm_eval/api/model.py`); here spaces need no rule of their own.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from mola.prompts import CHAT, render_prompts
from mola.rows import load_splits

__all__ = ["TaskData", "encode_splits", "load_splits"]

_Encoded = tuple[list[int], list[list[int]]]  # ids of a prompt, ids of each of its answers
_BATCH = 1000  # rows tokenised at once; bounds what the tokenizer holds on the way

_TRAIN = Features({"input_ids": List(Value("int32")), "prompt_length": Value("int32")})
_CANDIDATES = Features(
    {
        "row": Value("int32"),
        "choice": Value("int32"),
        "is_gold": Value("bool"),
        "input_ids": List(Value("int32")),
        "prompt_length": Value("int32"),
    }
)


@dataclass(frozen=True)
class TaskData:
    """A data set as token ids, in memory.

    Attributes:
        train: A record per row: `input_ids` (prompt, answer, end token) and `prompt_length`; the
            answer's tokens are `input_ids[prompt_length:]`.
        validation: A record per candidate answer: `row` and `choice` (both from 0), `is_gold`,
            `input_ids`, `prompt_length`. A row without choices has one candidate, the gold one.
        test: As validation; None where there is none.
        name: The data set's name, for people.
        has_choices: Whether the rows of validation and test have choices.
        fingerprint: Hash of every split's token ids and structure.
        highest_token: The largest token id of all splits; a model has embeddings up to it.
    """

    train: Dataset
    validation: Dataset
    test: Dataset | None
    name: str
    has_choices: bool
    fingerprint: str
    highest_token: int


def encode_splits(
    splits: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_template: str | None,
    max_length: int,
    name: str,
) -> TaskData:
    """Fill in the prompts and tokenise every split.

    Every answer ends with the tokenizer's end token. A prompt begins with the begin token where
    the tokenizer adds one; a chat template brings its own. Of a row that is longer than
    `max_length`, the left of the prompt is cut, but not the begin token; the answer stays whole,
    and all candidates of a row keep the same prompt.

    Args:
        splits: As `load_splits` returns them.
        tokenizer: The base model's.
        prompt_template: None is Alpaca's without input, "chat" the tokenizer's chat template, else
            a text with `{instruction}` and perhaps `{input}`. The answer follows directly: end it
            with a line break or a space.
        max_length: Most tokens of prompt and answer together, end token included.
        name: The data set's name, for people and errors.

    Raises:
        ValueError: If the tokenizer lacks an end token or the chat template that is asked for, or
            knows no letters, the template is wrong, or an answer leaves no room for a prompt.

    Warns:
        UserWarning: If prompts were cut, with their number.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end token (eos_token); without one no answer ends")
    has_choices = "choices" in splits["validation"].column_names
    specials = _leading_specials(tokenizer)
    kept = [ids for ids in (specials, [tokenizer.bos_token_id]) if ids]
    data: dict[str, Dataset] = {}
    for split, rows in splits.items():
        columns = rows[:]
        answers = [[output] for output in columns["output"]]
        if has_choices and split != "train":
            answers = columns["choices"]
        prompts = render_prompts(rows, tokenizer, prompt_template)
        added = [] if prompt_template == CHAT else specials
        encoded = _encode(prompts, answers, tokenizer, added)
        fitted = _fit(encoded, kept, max_length, f"{name}, {split}")
        if split == "train":
            data[split] = _train_records(fitted)
        else:
            gold = [
                row.index(output) for row, output in zip(answers, columns["output"], strict=True)
            ]
            data[split] = _candidate_records(fitted, gold)
    return TaskData(
        train=data["train"],
        validation=data["validation"],
        test=data.get("test"),
        name=name,
        has_choices=has_choices,
        fingerprint=_fingerprint(data),
        highest_token=max(max(map(max, rows["input_ids"])) for rows in data.values()),
    )


def _leading_specials(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before a text: mostly its begin token, or none."""
    bare = _tokenize(tokenizer, ["a"])[0]
    whole: list[int] = tokenizer("a")["input_ids"]
    if not bare or bare[0] not in whole:
        raise ValueError("the tokenizer makes no token of the letter a; is it the model's?")
    return whole[: whole.index(bare[0])]


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, verbose=False
    )["input_ids"]
    return ids


def _encode(
    prompts: Sequence[str],
    answers: Sequence[Sequence[str]],
    tokenizer: PreTrainedTokenizerBase,
    added: list[int],
) -> Iterator[_Encoded]:
    """Yield the token ids of each prompt and of its answers.

    Args:
        prompts: One per row.
        answers: The candidates of each row.
        tokenizer: Has an end token.
        added: Tokens that go before each prompt which does not begin with them already.
    """
    for start in range(0, len(prompts), _BATCH):
        texts, candidates = prompts[start : start + _BATCH], answers[start : start + _BATCH]
        alone = _tokenize(tokenizer, list(texts))
        joint = iter(
            _tokenize(
                tokenizer,
                [text + c for text, row in zip(texts, candidates, strict=True) for c in row],
            )
        )
        for prompt, row in zip(alone, candidates, strict=True):
            wholes = [next(joint) for _ in row]
            shared = min(_common_prefix(prompt, whole) for whole in wholes)
            begin = [] if prompt[: len(added)] == added else added
            yield (
                begin + prompt[:shared],
                [[*whole[shared:], tokenizer.eos_token_id] for whole in wholes],
            )


def _common_prefix(prompt: list[int], whole: list[int]) -> int:
    if whole[: len(prompt)] == prompt:
        return len(prompt)
    return next(i for i, token in enumerate(prompt) if i == len(whole) or whole[i] != token)


def _fit(
    encoded: Iterable[_Encoded], always: Sequence[list[int]], max_length: int, where: str
) -> list[_Encoded]:
    """Cut the left of the prompts that are too long, but for the special tokens they begin with.

    Args:
        encoded: Token ids of prompts and answers.
        always: Beginnings of a prompt that are kept; the first that is there counts.
        max_length: Most tokens of a prompt with any of its answers.
        where: Data set and split, for errors.
    """
    fitted: list[_Encoded] = []
    cut, longest, longest_row = 0, 0, 0
    for number, (prompt, answers) in enumerate(encoded, start=1):
        if not prompt:
            raise ValueError(
                f"{where} row {number}: no token of the prompt comes before the answer; "
                "end the template with a line break"
            )
        kept = next((len(begin) for begin in always if prompt[: len(begin)] == begin), 0)
        answer = max(len(ids) for ids in answers)
        if answer + max(1, kept) > longest:
            longest, longest_row = answer + max(1, kept), number
        room = max_length - answer
        if len(prompt) > room:
            prompt = prompt[:kept] + prompt[len(prompt) - (room - kept) :]
            cut += 1
        fitted.append((prompt, answers))
    if longest > max_length:
        raise ValueError(
            f"{where} row {longest_row}: the answer leaves no room for a prompt in "
            f"max_length={max_length} tokens; raise it to {longest} or more, or shorten the answer"
        )
    if cut:
        warnings.warn(
            f"{where}: {cut} of {len(fitted)} prompts are cut on their left to fit in "
            f"max_length={max_length} tokens with their answers",
            stacklevel=3,
        )
    return fitted


def _train_records(rows: Sequence[_Encoded]) -> Dataset:
    columns = {
        "input_ids": [np.array(prompt + answer, np.int32) for prompt, (answer,) in rows],
        "prompt_length": [len(prompt) for prompt, _ in rows],
    }
    return Dataset.from_dict(columns, features=_TRAIN)


def _candidate_records(rows: Sequence[_Encoded], gold: Sequence[int]) -> Dataset:
    records = [
        (row, choice, choice == gold[row], np.array(prompt + answer, np.int32), len(prompt))
        for row, (prompt, answers) in enumerate(rows)
        for choice, answer in enumerate(answers)
    ]
    columns = dict(zip(_CANDIDATES, zip(*records, strict=True), strict=True))
    return Dataset.from_dict({k: list(v) for k, v in columns.items()}, features=_CANDIDATES)


def _fingerprint(data: Mapping[str, Dataset]) -> str:
    """Hash names, shapes and contents of all splits, independent of the machine."""
    digest = hashlib.sha256(b"mola data 1\0")
    for split in sorted(data):
        columns = data[split][:]
        lengths = np.array([len(ids) for ids in columns["input_ids"]], "<i8")
        digest.update(f"{split} {len(lengths)}\0".encode())
        digest.update(lengths.tobytes())
        digest.update(np.concatenate(columns.pop("input_ids")).astype("<i4").tobytes())
        for name in sorted(columns):
            digest.update(name.encode() + b"\0" + np.array(columns[name], "<i4").tobytes())
    return digest.hexdigest()[:16]
