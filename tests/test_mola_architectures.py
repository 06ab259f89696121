"""The adapter on a tiny random model of each family that people fine-tune."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from mola.batching import answer_logits, collate
from mola.choices import answer_log_probs
from mola.config import MolaConfig
from mola.model import detach, get_mola_model, load_mola_model
from mola.tuner import find_blocks

COMMON = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED = {**COMMON, "intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": (GATED, ATTENTION + MLP),
    "mistral": ({**GATED, "sliding_window": 4}, ATTENTION + MLP),
    "qwen2": (GATED, ATTENTION + MLP),
    "qwen3": (GATED, ATTENTION + MLP),
    "gemma": (GATED, ATTENTION + MLP),
    "gemma2": ({**GATED, "final_logit_softcapping": 5.0}, ATTENTION + MLP),
    "gemma3_text": (GATED, ATTENTION + MLP),
    "phi": (
        {**COMMON, "intermediate_size": 24},
        ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
    ),
    "phi3": (GATED, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    "gpt_neox": (
        {**COMMON, "intermediate_size": 24},
        ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    ),
    "gpt2": (
        {**{k: v for k, v in COMMON.items() if "hidden" not in k and "attention" not in k},
         "n_embd": 16, "n_layer": 3, "n_head": 2},
        ["c_attn", "c_proj", "c_fc", "c_proj"],
    ),
    "opt": (
        {**COMMON, "ffn_dim": 24, "word_embed_proj_dim": 16},
        ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    ),
}  # fmt: skip

IDS = [[1, 5, 6, 7, 8, 2], [1, 9, 2]]
RECORDS = [
    {"input_ids": IDS[0], "prompt_length": 4},
    {"input_ids": IDS[1], "prompt_length": 1},
]


def build(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES[family][0], **changes})
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_of_the_blocks_is_adapted_and_trained(
    family: str, tmp_path: Path
) -> None:
    base = build(family)
    before = base(torch.tensor([IDS[0]])).logits
    weights = {k: v.clone() for k, v in base.state_dict().items()}
    model = get_mola_model(base, MolaConfig(experts=(1, 3, 0), r=2), seed=0)
    assert torch.equal(model(torch.tensor([IDS[0]])).logits, before)
    adapted = model.base_model.targeted_module_names
    suffixes = sorted(name.rsplit(".", 1)[1] for name in adapted)
    assert suffixes == sorted(FAMILIES[family][1] * 3)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    batch = collate(RECORDS, "cpu")
    losses = []
    for _ in range(6):
        loss = torch.nn.functional.cross_entropy(answer_logits(model, batch), batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.any() for n, p in model.named_parameters() if "lora_B" in n)

    trained = model(torch.tensor([IDS[0]])).logits
    model.save_pretrained(tmp_path)
    base = detach(model)
    assert torch.equal(base(torch.tensor([IDS[0]])).logits, before)
    assert all(torch.equal(weights[k], v) for k, v in base.state_dict().items())
    assert torch.equal(load_mola_model(base, tmp_path)(torch.tensor([IDS[0]])).logits, trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_logits_equal_one_full_forward_pass_per_row(family: str) -> None:
    model = build(family)
    got = answer_logits(model, collate(RECORDS, "cpu"))
    expected = []
    for record in RECORDS:
        logits = model(torch.tensor([record["input_ids"]])).logits[0]
        expected.append(logits[record["prompt_length"] - 1 : -1])
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_gives_the_same_scores_as_none(family: str, adapted: bool) -> None:
    model: Any = build(family)
    if adapted:
        model = get_mola_model(model, MolaConfig(experts=(1, 3, 2), r=2), seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(1))
    rows = [
        [
            {"input_ids": [1, *prompt, *answer, 2], "prompt_length": len(prompt) + 1}
            for answer in answers
        ]
        for prompt, answers in (
            ([5, 6, 7, 8, 9, 10, 11], ([20], [21, 22], [23])),
            ([5], ([30, 31, 32], [20])),
        )
    ]
    model.eval()
    with torch.no_grad():
        shared = answer_log_probs(model, rows, torch.device("cpu"))
        batch = collate([record for row in rows for record in row], "cpu")
        log_p = answer_logits(model, batch).log_softmax(-1)
    assert shared is not None
    picked = log_p.gather(1, batch.targets[:, None])[:, 0]
    totals = torch.zeros(5).index_add(0, batch.rows, picked)
    got = torch.zeros(5).index_add(0, shared[2], shared[0])
    torch.testing.assert_close(got, totals, rtol=1e-4, atol=1e-4)
    hits = torch.zeros(5).index_add(0, batch.rows, (log_p.argmax(-1) == batch.targets).float())
    assert torch.equal(torch.zeros(5).index_add(0, shared[2], shared[1].float()), hits)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_base_model_that_is_a_mixture_itself_takes_adapters_on_its_attention(family: str) -> None:
    config = AutoConfig.for_model(
        family,
        **GATED,
        num_local_experts=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    base = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"is itself a mixture of experts.*adapt its attention"):
        get_mola_model(base, MolaConfig(experts=(2, 2, 2)))
    model = get_mola_model(base, MolaConfig(experts=(2, 2, 2), target_modules=ATTENTION))
    assert len(model.base_model.targeted_module_names) == 3 * 4


def test_an_encoder_decoder_model_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8)
    )
    with pytest.raises(ValueError, match="one list of numbered layers, found 2 lists of 2 layers"):
        find_blocks(model)
