"""A whole model with an adapter at the edges: no experts, one, one token, ties, a hundred times."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from mola.base import checkpoint_activations
from mola.config import MolaConfig
from mola.layer import MolaLayer
from mola.mixture import gates
from mola.model import MolaModel, detach, get_mola_model, record_routing

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])


def config(experts: tuple[int, ...], **settings: object) -> MolaConfig:
    return MolaConfig(experts=experts, r=2, lora_dropout=0.0, init_seed=0, **settings)  # type: ignore[arg-type]


def shake(model: nn.Module, std: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std, generator=generator)


def mola_layers(model: nn.Module) -> list[MolaLayer]:
    return [m for m in model.modules() if isinstance(m, MolaLayer)]


def test_layers_without_experts_are_the_base_models_own_modules(
    tiny_model: PreTrainedModel,
) -> None:
    untouched = list(tiny_model.model.layers[1].named_modules())
    model = get_mola_model(tiny_model, config((2, 0, 0, 3)))
    assert all(a is b for (_, a), (_, b) in zip(
        untouched, tiny_model.model.layers[1].named_modules(), strict=True
    ))  # fmt: skip
    assert not any(p.requires_grad for p in tiny_model.model.layers[2].parameters())
    assert len(mola_layers(model)) == 2 * 7


def test_a_frozen_layer_still_passes_gradients_down(tiny_model: PreTrainedModel) -> None:
    model = get_mola_model(tiny_model, config((2, 0, 0, 0))).train()
    shake(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert gradients
    assert all(g is not None and g.any() for g in gradients)


def test_a_batch_of_one_token_is_that_token_of_the_full_pass(tiny_model: PreTrainedModel) -> None:
    model = get_mola_model(tiny_model, config((1, 0, 3, 5))).eval()
    shake(model)
    with torch.no_grad():
        whole = model(input_ids=IDS[:1]).logits[:, :1]
        single = model(input_ids=IDS[:1, :1]).logits
    torch.testing.assert_close(single, whole)  # the first token sees no other


def test_an_empty_batch_gives_an_empty_output_and_finite_gradients(
    tiny_model: PreTrainedModel,
) -> None:
    model = get_mola_model(tiny_model, config((1, 0, 3, 5), router_aux_loss_coef=0.1)).train()
    outputs = [layer(torch.zeros(0, 6, layer.in_features)) for layer in mola_layers(model)]
    assert all(output.shape[:2] == (0, 6) for output in outputs)
    loss = torch.stack([output.sum() for output in outputs]).sum() + model.base_model.balance_loss()
    assert loss.item() == 0
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == (2 + 3 + 3) * 7
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_ties_are_broken_the_same_way_each_time_and_gates_sum_to_one(
    tiny_model: PreTrainedModel,
) -> None:
    model = get_mola_model(tiny_model, config((4, 4, 4, 4))).eval()
    shake(model)
    with torch.no_grad():
        for layer in mola_layers(model):
            layer.lora_router["default"].weight.zero_()  # every expert ties with every other
        first, second = model(input_ids=IDS).logits, model(input_ids=IDS).logits
        alone = model(input_ids=IDS[1:]).logits
    assert torch.equal(first, second)
    torch.testing.assert_close(first[1:], alone)  # the choice does not hang on the batch
    share = gates(torch.zeros(5, 4), 2)
    assert torch.equal(share, share[:1].expand(5, 4))
    assert torch.equal(share.sum(-1), torch.ones(5))


def test_a_token_that_all_experts_but_one_ignore_gets_that_ones_output(
    tiny_model: PreTrainedModel,
) -> None:
    model = get_mola_model(tiny_model, config((4, 0, 0, 0))).eval()
    shake(model)
    layer = mola_layers(model)[0]
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        router = layer.lora_router["default"].weight
        router.zero_()
        router[2] = 1e4 * x[0] / x[0].norm()  # expert 2 takes the first token by far
        A, B = layer.lora_A["default"].weight[4:6], layer.lora_B["default"].weight[:, 4:6]
        expected = layer.base_layer(x[0]) + 8 * B @ (A @ x[0])  # lora_alpha / r = 16 / 2
        torch.testing.assert_close(layer(x)[0], expected)


def copy_experts(lora: nn.Module, model: MolaModel) -> None:
    ours = {m.key: m for m in mola_layers(model)}
    for key, layer in ours.items():
        theirs = lora.base_model.model.get_submodule(key)  # type: ignore[union-attr, operator]
        for side in ("lora_A", "lora_B"):
            weight = getattr(theirs, side)["default"].weight
            weight.data.copy_(getattr(layer, side)["default"].weight)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_one_expert_per_layer_equals_peft_lora_forward_and_backward(
    tiny_model: PreTrainedModel, tiny_model_dir: object
) -> None:
    model = get_mola_model(tiny_model.double(), config((1, 1, 1, 1))).train()
    shake(model)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    gradients = {}
    for layer in mola_layers(model):
        for side in ("lora_A", "lora_B"):
            gradients[layer.key, side] = getattr(layer, side)["default"].weight.grad.clone()
    names = {layer.key.rsplit(".", 1)[1] for layer in mola_layers(model)}
    twin = type(tiny_model).from_pretrained(tiny_model_dir).double()
    lora = get_peft_model(
        twin,
        LoraConfig(r=2, lora_alpha=16, target_modules=sorted(names), task_type="CAUSAL_LM"),
    ).train()
    copy_experts(lora, model)
    expected = lora(input_ids=IDS, labels=IDS).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for (key, side), gradient in gradients.items():
        theirs = getattr(lora.base_model.model.get_submodule(key), side)["default"].weight.grad
        torch.testing.assert_close(gradient, theirs)


def inventory(model: nn.Module) -> tuple[list[str], int, int]:
    hooks = sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )
    return [n for n, _ in model.named_modules()], sum(p.numel() for p in model.parameters()), hooks


def live_tensors() -> int:
    gc.collect()
    return sum(1 for o in gc.get_objects() if issubclass(type(o), Tensor))


def test_a_hundred_attachments_leave_nothing_behind(tiny_model: PreTrainedModel) -> None:
    weights = {k: v.clone() for k, v in tiny_model.state_dict().items()}
    before, tensors = inventory(tiny_model), 0
    adapters: list[weakref.ref[nn.Module]] = []
    for round_ in range(100):
        settings = config((1, 0, 2, 3), router_aux_loss_coef=0.1, target_modules=["q_proj"])
        model = get_mola_model(tiny_model, settings)
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        adapters += [weakref.ref(model), weakref.ref(mola_layers(model)[0])]
        detach(model).eval()  # type: ignore[no-untyped-call]
        del model
        if round_ == 0:
            tensors = live_tensors()
    assert live_tensors() <= tensors
    assert [ref() for ref in adapters if ref() is not None] == []
    assert inventory(tiny_model) == before
    assert not hasattr(tiny_model, "peft_config")
    assert all(torch.equal(weights[k], v) for k, v in tiny_model.state_dict().items())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_expert_that_got_tokens_has_learned(
    tiny_model: PreTrainedModel, checkpointing: bool
) -> None:
    targets = ["v_proj", "o_proj", "up_proj", "down_proj"]
    model = get_mola_model(tiny_model, config((1, 0, 3, 8), target_modules=targets)).train()
    counted = torch.ones_like(IDS)
    counted[:, -1] = 0  # nothing is predicted from the last token, and these modules mix none in
    if checkpointing:
        checkpoint_activations(tiny_model, True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with record_routing(model) as record:
        for _ in range(3):
            model(input_ids=IDS, labels=IDS, token_mask=counted).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    loads = record.modules()
    for layer in mola_layers(model):
        B = layer.lora_B["default"].weight.unflatten(1, (-1, 2))  # [d_out, N, r]
        learned = B.flatten(2).any(dim=2).any(dim=0)
        load = loads[layer.key]["load"] if layer.key in loads else [1.0]
        assert learned.tolist() == [share > 0 for share in load], layer.key
    assert any(0 in values["load"] for values in loads.values())  # some got none, and stay zero
