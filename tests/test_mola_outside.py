"""A trained adapter in other programs: the README's lines, and EleutherAI's evaluation harness."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from mola import MolaConfig, get_mola_model, load_mola_model
from mola.base import load_model
from mola.demo import MODEL_DIR
from mola.prompts import ALPACA_TEMPLATE
from mola.settings import ModelSource

ROOT = Path(__file__).parent.parent
QUESTION = ALPACA_TEMPLATE.format(instruction="numbers kim, ann, gus. what is the most?")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the built-in model whose weights are far from the identity."""
    folder = tmp_path_factory.mktemp("adapter")
    model = get_mola_model(load_model(ModelSource()), MolaConfig(experts="1x16 3x16", init_seed=0))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.02, generator=generator)
    model.save_pretrained(folder)
    return folder


def readme_block(words: str) -> str:
    """The README's Python example that contains some words."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if words in block)
    assert isinstance(block, str)
    return block


def test_the_readmes_lines_generate_with_an_adapter(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    code = readme_block("model.generate(")
    assert code.count('"adapter"') == 1
    exec(compile(code.replace('"adapter"', repr(str(adapter))), "README.md", "exec"), {})  # noqa: S102
    said = capsys.readouterr().out
    assert "what is the most?" in said
    assert len(said) > len(QUESTION)


def test_the_harness_scores_answers_as_we_do(adapter: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    from lm_eval.api.instance import Instance

    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = load_mola_model(MODEL_DIR, adapter)
    names: dict[str, Any] = {"model": model, "tokenizer": tokenizer}
    lines = [line for line in readme_block("HFLM(").splitlines() if "HFLM" in line]
    exec("\n".join(lines), names)  # noqa: S102 - the README's own lines
    # as its tasks write it: no white space at the end of a question, a blank before the answer
    question, answers = "numbers kim, ann, gus. what is the most?", [" kim", " ann gus"]
    requests = [
        Instance("loglikelihood", {}, (question, answer), i) for i, answer in enumerate(answers)
    ]
    scores = names["harness"].loglikelihood(requests, disable_tqdm=True)
    start = tokenizer(question, return_tensors="pt").input_ids
    for answer, (found, greedy) in zip(answers, scores, strict=True):
        ids = tokenizer(question + answer, return_tensors="pt").input_ids
        with torch.inference_mode():
            log_p = model(input_ids=ids).logits[0].float().log_softmax(-1)
        places = range(start.shape[1], ids.shape[1])
        assert found == pytest.approx(sum(log_p[i - 1, ids[0, i]].item() for i in places), abs=1e-3)
        assert greedy == all(int(log_p[i - 1].argmax()) == int(ids[0, i]) for i in places)
