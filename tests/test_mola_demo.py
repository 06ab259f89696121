from __future__ import annotations

import json
import subprocess
import sys
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mola.demo import DEFAULTS, MODEL_DIR, load_task
from mola.demo.corpus import draw_documents, pad, score_family
from mola.demo.muon import orthogonalise
from mola.demo.pretrain import Settings, grow, main, new_model
from mola.demo.task import draw_row
from mola.demo.text import FAMILIES, PREAMBLE, RESPONSE, segments
from mola.prompts import ALPACA_TEMPLATE

FAST_FAMILIES = ("compare", "extreme", "neighbour", "parity")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


@pytest.fixture(scope="module")
def task():
    return load_task()


def test_import_costs_no_torch():
    code = "import sys, mola.demo; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_model_has_32_layers_in_at_most_8_megabytes(model):
    assert model.config.num_hidden_layers == 32
    assert model.config.model_type == "llama"
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= 8_000_000


def test_model_writes_answers_by_generation(model, tokenizer):
    prompt = ALPACA_TEMPLATE.format(instruction="numbers 7, 3, 12. what is the most?")
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).strip() == "12"
    assert answer[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "text",
    ["ann has 7, bob has 3.", "Größe 10 €, 你好\n\tx  y", f"{PREAMBLE}sort 2, 1.{RESPONSE}1, 2"],
)
def test_tokenizer_round_trips(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_has_a_token_for_each_fixed_phrase_of_the_default_template(tokenizer):
    ids = tokenizer(ALPACA_TEMPLATE.format(instruction="what is 7 plus 3?"))["input_ids"]
    assert len(ids) == len(["<s>", "preamble", "what", "is", "7", "plus", "3", "?", "response"])


@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_model_has_learned_what_an_untrained_one_has_not(model, tokenizer, family):
    untrained = new_model(Settings(stages=((2, 1),)), 2, tokenizer)
    trained = score_family(model, tokenizer, family, rows=50)
    assert trained.accuracy >= 0.9
    assert trained.nll < score_family(untrained, tokenizer, family, rows=50).nll / 4


@pytest.mark.parametrize("family", FAMILIES)
def test_family_draws_the_same_passages_from_the_same_seed(family):
    passages = [[FAMILIES[family](rng) for _ in range(50)] for rng in (Random(3), Random(3))]
    assert passages[0] == passages[1]
    assert len(set(passages[0])) > 1


def test_answers_alone_are_marked_in_both_shapes(tokenizer):
    for share, end in ((1.0, True), (0.0, False)):
        for document in draw_documents(Random(0), ["compare"], tokenizer, 20, alpaca_share=share):
            answers = [
                tokenizer.decode([i]).strip()
                for i, marked in zip(document.ids, document.is_answer, strict=True)
                if marked
            ]
            assert document.is_answer[-1] is end
            assert all(a.isdigit() or a in (".", "</s>") for a in answers)


def test_prose_continues_a_context_with_every_question():
    passage = FAMILIES["extreme"](Random(1))
    text = "".join(piece for piece, _ in segments(passage, alpaca=False))
    assert all(f"{question}{answer}." in text for question, answer in passage.questions)


def test_padding_has_no_weight(tokenizer):
    documents = draw_documents(Random(0), list(FAMILIES), tokenizer, 8, alpaca_share=0.5)
    ids, weights = pad(documents, tokenizer.pad_token_id, prompt_weight=0.1)
    assert torch.equal(weights == 0, ids == tokenizer.pad_token_id)


def test_task_is_the_same_at_each_load(task):
    again = load_task()
    assert all(task[split][:] == again[split][:] for split in ("train", "validation", "test"))


def test_task_splits_share_no_row(task):
    instructions = [row["instruction"] for split in task.values() for row in split]
    assert len(instructions) == len(set(instructions))


def test_gold_is_one_of_distinct_choices():
    rng = Random(0)
    for _ in range(500):
        row = draw_row(rng)
        assert row["output"] in row["choices"]
        assert len(set(row["choices"])) == len(row["choices"])
        assert 2 <= len(row["choices"]) <= 5


def test_pretraining_text_never_uses_names_as_numbers(task):
    rng = Random(0)
    passages = [family(rng) for family in FAMILIES.values() for _ in range(500)]
    words = {p.context.split()[1] for p in passages if p.context.startswith("numbers ")}
    asked = {row.split()[1] for row in task["validation"]["instruction"]}
    assert words
    assert asked
    assert not words & asked


def test_task_fits_the_recommended_length(task, tokenizer):
    texts = [ALPACA_TEMPLATE.format(instruction=i) for i in task["validation"]["instruction"]]
    longest = max(len(ids) for ids in tokenizer(texts)["input_ids"])
    assert longest + 2 <= DEFAULTS["max_length"]  # the answer and its end token


def test_grown_model_computes_the_same(tokenizer):
    torch.manual_seed(0)
    shallow = new_model(Settings(), 2, tokenizer)
    deep = grow(shallow, 4)
    ids = torch.randint(0, len(tokenizer), (2, 12))
    assert deep.config.num_hidden_layers == 4
    # the copies add exact zeros
    assert torch.equal(deep(ids).logits, shallow(ids).logits)


def test_orthogonalise_brings_singular_values_close_to_one():
    matrices = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    # the iteration's coefficients trade exactness for speed: 0.7 to 1.2
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_pretraining_writes_a_folder_that_loads(tmp_path):
    main(["--out", str(tmp_path), "--stages", "1x1 2x1"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.num_hidden_layers == 2
    assert tokenizer("sort 2, 1.")["input_ids"]
    assert json.loads((tmp_path / "config.json").read_text())["bos_token_id"] == 1
