"""Attaching, detaching, saving and loading a MoLA adapter."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mola.base import checkpoint_activations, load_model
from mola.config import MolaConfig
from mola.model import detach, get_mola_model, load_mola_model, record_routing, routing_statistics
from mola.settings import ModelSource

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def base(tiny_model_dir: Path) -> PreTrainedModel:
    return load_model(ModelSource(str(tiny_model_dir)))


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=IDS).logits
    return result


def shake(model: torch.nn.Module) -> None:
    """Give B a value, so that the adapter does something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5, generator=generator)


def test_a_fresh_adapter_is_the_identity(base: PreTrainedModel) -> None:
    before = logits(base)
    assert torch.equal(logits(get_mola_model(base, MolaConfig(experts="2x2 4x2"))), before)


def test_detach_restores_the_base_model_bit_for_bit(base: PreTrainedModel) -> None:
    before, weights = logits(base), {k: v.clone() for k, v in base.state_dict().items()}
    modules = [name for name, _ in base.named_modules()]
    for _ in range(3):
        model = get_mola_model(base, MolaConfig(experts=(1, 0, 3, 5)))
        shake(model)
        assert not torch.equal(logits(model), before)
        base = detach(model)
    assert torch.equal(logits(base), before)
    assert [name for name, _ in base.named_modules()] == modules
    assert all(torch.equal(weights[k], v) for k, v in base.state_dict().items())


def test_only_the_adapter_is_trained_and_zero_experts_leave_a_layer_alone(
    base: PreTrainedModel,
) -> None:
    model = get_mola_model(base, MolaConfig(experts=(1, 0, 3, 5)))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert not any(".layers.1." in name for name in trained)
    assert not any("lora_router" in name for name in trained if ".layers.0." in name)


def test_all_linear_layers_of_the_blocks_are_adapted_by_default(base: PreTrainedModel) -> None:
    model = get_mola_model(base, MolaConfig(experts=(2, 2, 2, 2)))
    assert sorted(n.rsplit(".", 1)[1] for n in model.base_model.targeted_module_names) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"] * 4
    )


@pytest.mark.parametrize(
    ("total", "layers", "shape", "expected"),
    [
        (160, 32, {"hidden_size": 4096, "intermediate_size": 11008}, 105_635_840),
        (256, 32, {"hidden_size": 4096, "intermediate_size": 11008}, 169_017_344),
        (128, 32, {"hidden_size": 4096, "intermediate_size": 11008}, 84_508_672),
        (
            160,
            32,
            {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8},
            111_083_520,
        ),
    ],
)
def test_trainable_parameters_equal_the_published_counts(
    total: int, layers: int, shape: dict[str, int], expected: int
) -> None:
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=32, num_hidden_layers=layers, num_attention_heads=32, **shape
        )
        model = get_mola_model(
            LlamaForCausalLM(config), MolaConfig(experts=(total // layers,) * layers)
        )
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected


def test_a_saved_adapter_loads_back_with_equal_logits(
    base: PreTrainedModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = get_mola_model(base, MolaConfig(experts=(1, 0, 3, 5)))
    shake(model)
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    written = sorted(p.name for p in (tmp_path / "adapter").iterdir())
    assert written == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["experts"] == [
        1, 0, 3, 5,
    ]  # fmt: skip
    assert str(tiny_model_dir) in (tmp_path / "adapter/README.md").read_text()
    detach(model)
    assert torch.equal(logits(load_mola_model(tiny_model_dir, tmp_path / "adapter")), expected)
    fresh = load_model(ModelSource(str(tiny_model_dir)))
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
    assert torch.equal(logits(PeftModel.from_pretrained(fresh, tmp_path / "adapter")), expected)


def test_peft_knows_the_method(base: PreTrainedModel) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        model = get_peft_model(base, MolaConfig(experts=(2, 2, 2, 2)))
    shake(model)
    with model.disable_adapter():
        disabled = logits(model)
    assert not torch.equal(logits(model), disabled)
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape[1] <= IDS.shape[1] + 2


def test_merging_is_refused(base: PreTrainedModel) -> None:
    model = get_mola_model(base, MolaConfig(experts=(2, 2, 2, 2)))
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match="cannot be merged: each token is routed"):
            merge()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": [1, 0, 3]}, "allocation has 3 layers, but the base model has 4"),
        ({"experts": [1, 0, 3, 4]}, "weights of another shape"),
        ({"experts": [1, 1, 3, 5]}, "missing weights"),
        ({"experts": [1, 0, 0, 5]}, "unexpected weights"),
        ({"format_version": 99}, "is newer than"),
        ({"peft_type": "LORA"}, "expected 'MOLA'"),
        ({"surprise": 1}, "unknown keys surprise"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    base: PreTrainedModel, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    get_mola_model(base, MolaConfig(experts=(1, 0, 3, 5))).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    base = load_model(ModelSource(base.name_or_path))
    with pytest.raises(ValueError, match=message):
        load_mola_model(base, tmp_path)


def test_a_truncated_weight_file_is_refused(base: PreTrainedModel, tmp_path: Path) -> None:
    get_mola_model(base, MolaConfig(experts=(1, 0, 3, 5))).save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: cannot be read"):
        load_mola_model(base.name_or_path, tmp_path)


def test_a_failed_save_keeps_the_previous_adapter(
    base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = get_mola_model(base, MolaConfig(experts=(2, 2, 2, 2)))
    model.save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    shake(model)
    monkeypatch.setattr("peft.peft_model.safe_save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_saving_twice_replaces_the_weights(base: PreTrainedModel, tmp_path: Path) -> None:
    model = get_mola_model(base, MolaConfig(experts=(2, 2, 2, 2)))
    model.save_pretrained(tmp_path)
    shake(model)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all(tensor.any() for key, tensor in saved.items() if "lora_B" in key)


def test_routing_statistics_are_per_layer(base: PreTrainedModel) -> None:
    model = get_mola_model(base, MolaConfig(experts=(1, 0, 3, 5)))
    with record_routing(model) as record:
        logits(model)
    stats = routing_statistics(record, 4)
    assert [len(load) for load in stats["load"]] == [0, 0, 3, 5]
    assert sum(stats["load"][2]) == pytest.approx(2, abs=1e-3)  # top 2 of 3
    assert stats["entropy"][:2] == [None, None]
    assert all(0 < e <= 1 for e in stats["entropy"][2:])


def test_balance_loss_joins_the_loss_of_the_output(base: PreTrainedModel) -> None:
    plain = get_mola_model(base, MolaConfig(experts=(2, 2, 3, 5), lora_dropout=0.0))
    loss = plain.train()(input_ids=IDS, labels=IDS).loss
    base = detach(plain)
    config = MolaConfig(experts=(2, 2, 3, 5), lora_dropout=0.0, router_aux_loss_coef=0.5)
    balanced = get_mola_model(base, config).train()
    mask = torch.ones_like(IDS)
    with_balance = balanced(input_ids=IDS, attention_mask=mask, labels=IDS).loss
    assert 0.5 <= (with_balance - loss).item() < 0.5 * 5
    with_balance.backward()
    assert all(
        p.grad is not None and p.grad.any()
        for n, p in balanced.named_parameters()
        if "lora_router" in n
    )


def test_gradient_checkpointing_changes_neither_loss_nor_gradients(base: PreTrainedModel) -> None:
    config = MolaConfig(
        experts=(2, 2, 3, 5), lora_dropout=0.0, router_aux_loss_coef=0.5, init_seed=0
    )
    model = get_mola_model(base, config).train()
    shake(model)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_activations(base, True)
        model.zero_grad()
        loss = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS).loss
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results.append((loss.detach(), gradients))
    assert len(results[0][1]) == 4 * 7 * 3
    torch.testing.assert_close(results[0], results[1])


def test_target_modules_outside_of_the_layers_are_refused(base: PreTrainedModel) -> None:
    before = [name for name, _ in base.named_modules()]
    config = MolaConfig(experts=(2, 2, 2, 2), target_modules=["q_proj", "lm_head"])
    with pytest.raises(ValueError, match="lies outside of the numbered layers"):
        get_mola_model(base, config)
    assert [name for name, _ in base.named_modules()] == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs `experts`"),
        ({"experts": (2,), "r": 0}, "r=0 of the MoLA config must be an integer of at least 1"),
        ({"experts": (2,), "top_k": 0}, "top_k=0"),
        ({"experts": (2,), "lora_dropout": 1.0}, "lora_dropout=1.0"),
        ({"experts": (2,), "router_aux_loss_coef": -1.0}, "router_aux_loss_coef=-1.0"),
    ],
)
def test_config_refuses_values_out_of_range(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MolaConfig(**settings)  # type: ignore[arg-type]
