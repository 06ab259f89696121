from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mola.data import TaskData, encode_splits, load_splits

BOS, EOS = 0, 1


def build_tokenizer(*, adds_bos: bool = False, eos: str | None = "</s>") -> PreTrainedTokenizerBase:
    """A byte-level BPE that joins a space or a colon with the letter after it."""
    symbols = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    joined = [(first, letter) for first in "Ġ:" for letter in "abyn"]
    vocabulary = {s: i for i, s in enumerate([*symbols, *(a + b for a, b in joined)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=joined))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos
    )


PLAIN, WITH_BOS = build_tokenizer(), build_tokenizer(adds_bos=True)


def rows(prompts: list[str], outputs: list[str], choices: list[list[str]] | None = None) -> Dataset:
    columns: dict[str, Any] = {
        "instruction": prompts,
        "input": [""] * len(prompts),
        "output": outputs,
    }
    if choices is not None:
        columns["choices"] = choices
    return Dataset.from_dict(columns)


def encode(
    prompt: str = "q",
    output: str = "a",
    choices: list[str] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase = PLAIN,
    prompt_template: str | None = "{instruction}\n",
    max_length: int = 64,
) -> TaskData:
    one = rows([prompt], [output], None if choices is None else [choices])
    return encode_splits(
        {"train": one, "validation": one},
        tokenizer,
        prompt_template=prompt_template,
        max_length=max_length,
        name="ours",
    )


def texts(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase = PLAIN) -> tuple[str, str]:
    ids, length = record["input_ids"], record["prompt_length"]
    return tokenizer.decode(ids[:length]), tokenizer.decode(ids[length:])


def test_a_train_record_is_prompt_answer_and_end_token() -> None:
    record = encode("what?", "this").train[0]
    assert texts(record) == ("what?\n", "this</s>")
    assert record["prompt_length"] == 6


def test_a_validation_record_is_a_candidate() -> None:
    data = encode("what?", "no", ["yes", "no"])
    assert data.has_choices
    assert data.test is None
    assert [(r["row"], r["choice"], r["is_gold"]) for r in data.validation] == [
        (0, 0, False),
        (0, 1, True),
    ]
    assert [texts(r) for r in data.validation] == [("what?\n", "yes</s>"), ("what?\n", "no</s>")]


def test_without_choices_the_gold_output_is_the_one_candidate() -> None:
    data = encode("what?", "no")
    assert not data.has_choices
    assert [texts(r) for r in data.validation] == [("what?\n", "no</s>")]
    assert data.validation[0]["is_gold"]


def test_a_token_across_the_boundary_is_the_answers() -> None:
    record = encode("q", "a", prompt_template="{instruction}? ").train[0]
    assert texts(record) == ("q?", " a</s>")
    assert len(record["input_ids"]) == 4  # "q", "?", " a", end


def test_candidates_share_their_prompt_even_if_one_alone_joins_it() -> None:
    data = encode("q", "a", ["a", "z"], prompt_template="{instruction}:")
    assert [texts(r) for r in data.validation] == [("q", ":a</s>"), ("q", ":z</s>")]


def test_an_answer_gets_no_space_that_the_tokenizer_puts_before_a_text() -> None:
    vocabulary = {s: i for i, s in enumerate(["<s>", "</s>", "▁", "q", ">", "a"])}
    sentencepiece_like = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    sentencepiece_like.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=sentencepiece_like, bos_token="<s>", eos_token="</s>"
    )
    record = encode(tokenizer=tokenizer, prompt_template="{instruction}>").train[0]
    assert tokenizer.convert_ids_to_tokens(record["input_ids"]) == ["▁", "q", ">", "a", "</s>"]


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.text(min_size=1),
    choices=st.lists(st.text(min_size=1), min_size=2, max_size=4, unique=True),
    template=st.sampled_from(["{instruction}\n", "x{instruction} ", "{instruction}:", None]),
)
def test_every_candidate_has_the_tokens_of_the_whole_text(
    prompt: str, choices: list[str], template: str | None
) -> None:
    data = encode(prompt, choices[0], choices, prompt_template=template, max_length=10_000)
    prompts = {tuple(r["input_ids"][: r["prompt_length"]]) for r in data.validation}
    assert len(prompts) == 1
    for record, choice in zip(data.validation, choices, strict=True):
        filled = (template or "").format(instruction=prompt) + choice
        ids = record["input_ids"]
        assert ids[-1] == EOS
        assert PLAIN.decode(ids[:-1], clean_up_tokenization_spaces=False).endswith(filled)
        assert ids[:-1] == PLAIN(PLAIN.decode(ids[:-1]), add_special_tokens=False)["input_ids"]


def test_the_begin_token_is_there_once() -> None:
    assert encode(tokenizer=PLAIN).train[0]["input_ids"].count(BOS) == 0
    assert encode(tokenizer=WITH_BOS).train[0]["input_ids"].count(BOS) == 1
    written = encode(tokenizer=WITH_BOS, prompt_template="<s>{instruction}\n").train[0]
    assert written["input_ids"].count(BOS) == 1


@pytest.mark.parametrize("begin", ["{{ bos_token }}", ""])
def test_a_chat_template_decides_about_the_begin_token(begin: str) -> None:
    tokenizer = build_tokenizer(adds_bos=True)
    tokenizer.chat_template = begin + "{{ messages[0]['content'] }}>"
    record = encode(tokenizer=tokenizer, prompt_template="chat").train[0]
    assert texts(record) == ("<s>q>" if begin else "q>", "a</s>")


def test_what_is_too_long_loses_the_left_of_its_prompt() -> None:
    with pytest.warns(UserWarning, match="1 of 1 prompts are cut on their left .* max_length=8"):
        record = encode("0123456789", "this", max_length=8).train[0]
    assert texts(record) == ("89\n", "this</s>")


def test_the_cut_keeps_the_begin_token() -> None:
    with pytest.warns(UserWarning, match="cut"):
        record = encode("0123456789", "this", tokenizer=WITH_BOS, max_length=8).train[0]
    assert texts(record) == ("<s>9\n", "this</s>")
    with pytest.warns(UserWarning, match="cut"):
        record = encode("0123456789", "this", tokenizer=WITH_BOS, max_length=6).train[0]
    assert texts(record) == ("<s>", "this</s>")


def test_the_cut_is_the_same_for_all_candidates_of_a_row() -> None:
    with pytest.warns(UserWarning, match="cut"):
        data = encode("0123456789", "z", ["zzzz", "z"], max_length=8)
    assert [texts(r) for r in data.validation] == [("89\n", "zzzz</s>"), ("89\n", "z</s>")]


def test_an_answer_that_leaves_no_room_is_named_with_what_it_needs() -> None:
    splits = {s: rows(["a", "b", "c"], ["z", "zzzzz", "zz"]) for s in ("train", "validation")}
    with pytest.raises(ValueError, match=r"^ours, train row 2: .* raise it to 7 or more"):
        encode_splits(splits, PLAIN, prompt_template="{instruction}\n", max_length=6, name="ours")
    with pytest.warns(UserWarning, match="cut"):
        encode_splits(splits, PLAIN, prompt_template="{instruction}\n", max_length=7, name="ours")


def test_a_prompt_without_a_token_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1: no token of the prompt comes before the answer"):
        encode(" ", "a", prompt_template="{instruction}")


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    with pytest.raises(ValueError, match="no end token"):
        encode(tokenizer=build_tokenizer(eos=None))


def test_a_tokenizer_that_knows_no_letters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mola.data._tokenize", lambda tokenizer, texts: [[] for _ in texts])
    with pytest.raises(ValueError, match="makes no token of the letter a; is it the model's?"):
        encode()


def test_the_highest_token_is_that_of_all_splits() -> None:
    data = encode("what?", "no", ["yes", "no"])
    rows = [*data.train["input_ids"], *data.validation["input_ids"]]
    assert data.highest_token == max(map(max, rows))


def test_the_fingerprint_is_of_tokens_and_structure(choices_dir: Path, text_dir: Path) -> None:
    def fingerprint(folder: Path, **changes: Any) -> str:
        options = {"prompt_template": None, "max_length": 256, "name": "n", **changes}
        return encode_splits(load_splits(str(folder)), PLAIN, **options).fingerprint

    same = fingerprint(choices_dir)
    assert same == fingerprint(choices_dir, name="other", max_length=512)
    others = {
        fingerprint(text_dir),
        fingerprint(choices_dir, prompt_template="{instruction}\n"),
        encode("q", "a", ["a", "b"]).fingerprint,
        encode("q", "b", ["a", "b"]).fingerprint,
        encode("q", "a", ["b", "a"]).fingerprint,
        encode("q", "a").fingerprint,
        encode("q", "a", prompt_template="{instruction}").fingerprint,
        encode("q\n", "a", prompt_template="{instruction}").fingerprint,
    }
    assert same not in others
    assert len(others) == 7  # the last is the same text as "q" with the line break's template


def test_task_data_survives_pickling(choices_dir: Path) -> None:
    data = encode_splits(
        load_splits(str(choices_dir)), PLAIN, prompt_template=None, max_length=256, name="letters"
    )
    copy = pickle.loads(pickle.dumps(data))  # noqa: S301
    assert copy.test is not None
    assert copy.fingerprint == data.fingerprint
    assert copy.train.to_list() == data.train.to_list()
    assert copy.validation.to_list() == data.validation.to_list()
    assert len(copy.test) == 24


def test_many_batches_are_encoded_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {
        s: rows([f"{s} {i}" for i in range(7)], ["a"] * 7, [["a", "b"][: 2 + i] for i in range(7)])
        for s in ("train", "validation")
    }
    options: dict[str, Any] = {"prompt_template": None, "max_length": 256, "name": "n"}
    whole = encode_splits(splits, PLAIN, **options)
    monkeypatch.setattr("mola.data._BATCH", 3)
    assert encode_splits(splits, PLAIN, **options).fingerprint == whole.fingerprint
