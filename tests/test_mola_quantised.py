"""Adapters on quantised base layers: bitsandbytes where it is installed, else a stand-in."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from peft import prepare_model_for_kbit_training
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from mola.config import MolaConfig
from mola.layer import MolaLayer
from mola.model import MolaModel, detach, get_mola_model, load_mola_model

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed; the stand-in covers what is ours",
)
quiet = pytest.mark.filterwarnings(
    "ignore:MatMul8bitLt", "ignore:.*is_gradient_checkpointing", "ignore:.*gradient_checkpointing_e"
)


class Packed(nn.Linear):
    """A linear layer as bitsandbytes leaves it: flat integers, from which the weight is made."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        scale = linear.weight.detach().abs().max() / 127
        codes = (linear.weight.detach() / scale).round() + 128
        self.weight = nn.Parameter(codes.to(torch.uint8).reshape(-1, 1), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.weight.reshape(self.out_features, self.in_features)
        return F.linear(x, (codes.to(x.dtype) - 128) * self.scale)


def pack(base: PreTrainedModel) -> PreTrainedModel:
    for parent in list(base.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Packed(child))
    return base


def logits(model: nn.Module) -> Tensor:
    # In evaluation mode bitsandbytes repacks 4-bit weights on a CPU, and cannot train them then.
    model.train()  # there is no dropout in these models
    with torch.no_grad():
        result: Tensor = model(input_ids=IDS).logits
    return result


def train(model: MolaModel, steps: int = 5) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_a_whole_life(base: PreTrainedModel, folder: Path) -> None:
    """Attach, train, save, detach and load; the base model's codes never change."""
    codes = {k: v.clone() for k, v in base.state_dict().items() if isinstance(v, Tensor)}
    before = logits(base)
    config = MolaConfig(
        experts=(1, 0, 3, 5), r=2, lora_dropout=0.0, init_seed=0, router_aux_loss_coef=0.01
    )
    model = get_mola_model(base, config)
    layers = [m for m in model.modules() if isinstance(m, MolaLayer)]
    assert len(layers) == 3 * 7
    for layer in layers:
        weight = layer.get_base_layer().weight
        assert not weight.is_floating_point()
        for parameter in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
            assert (parameter.dtype, parameter.device) == (torch.float32, weight.device)
            assert parameter.requires_grad
        assert layer.lora_A["default"].weight.shape[1] == layer.get_base_layer().in_features
    assert torch.equal(logits(model), before)
    losses = train(model)
    assert losses[-1] < 0.9 * losses[0]
    trained = logits(model)
    model.save_pretrained(folder)
    base = detach(model)
    assert torch.equal(logits(base), before)
    state = base.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in codes.items())
    assert torch.equal(logits(load_mola_model(base, folder)), trained)


def test_packed_weights_of_another_shape_are_adapted(
    tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    base = pack(tiny_model)
    assert base.model.layers[0].mlp.up_proj.weight.shape == (32 * 16, 1)
    check_a_whole_life(base, tmp_path)


@quiet
def test_packed_weights_survive_the_preparation_for_training(tiny_model: PreTrainedModel) -> None:
    base = prepare_model_for_kbit_training(pack(tiny_model.to(torch.bfloat16)))
    model = get_mola_model(base, MolaConfig(experts=(1, 0, 3, 5), r=2, init_seed=0))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    losses = train(model)
    assert losses[-1] < losses[0]


def test_a_layer_that_is_linear_by_its_attributes_alone_is_refused_by_name(
    tiny_model: PreTrainedModel,
) -> None:
    class GPTQLinear(nn.Module):
        in_features, out_features = 16, 16

    tiny_model.model.layers[3].self_attn.q_proj = GPTQLinear()
    modules = [name for name, _ in tiny_model.named_modules()]
    with pytest.raises(ValueError, match="GPTQLinear is none; narrow `target_modules`"):
        get_mola_model(tiny_model, MolaConfig(experts=(2, 2, 2, 2), target_modules=["q_proj"]))
    assert [name for name, _ in tiny_model.named_modules()] == modules


def load_quantised(folder: Path, bits: int) -> PreTrainedModel:
    """Quantise a model that is wide enough for bitsandbytes' kernels."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=2, initializer_range=0.1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    device = 0 if torch.cuda.is_available() else "cpu"
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={"": device}
    )
    assert isinstance(base, PreTrainedModel)
    return base


@needs_bitsandbytes
@quiet
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_layers_are_adapted(tmp_path: Path, bits: int) -> None:
    base = load_quantised(tmp_path / "base", bits)
    name = {4: "Linear4bit", 8: "Linear8bitLt"}[bits]
    assert type(base.model.layers[0].mlp.up_proj).__name__ == name
    check_a_whole_life(base, tmp_path / "adapter")


@needs_bitsandbytes
@quiet
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_with_pefts_preparation_and_checkpointing(tmp_path: Path, bits: int) -> None:
    base = prepare_model_for_kbit_training(
        load_quantised(tmp_path, bits),
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    config = MolaConfig(experts=(1, 0, 3, 5), r=2, init_seed=0, router_aux_loss_coef=0.01)
    losses = train(get_mola_model(base, config))
    assert losses[-1] < losses[0]
