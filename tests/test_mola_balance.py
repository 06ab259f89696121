"""The balance loss in a model: both variants, checkpointing, accumulation, the Trainer's count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mola.base import checkpoint_activations
from mola.config import MolaConfig
from mola.layer import MolaLayer
from mola.model import MolaModel, get_mola_model
from mola.routing import balance_loss, router_load

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 2, 0, 0]])
MASK = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
LABELS = IDS.masked_fill(MASK == 0, -100)
VARIANTS = ("per_router", "pooled")


def attach(base: PreTrainedModel, variant: str, coef: float = 0.5, **settings: Any) -> MolaModel:
    config = MolaConfig(
        experts=settings.pop("experts", (1, 0, 3, 5)),
        r=2,
        lora_dropout=0.0,
        init_seed=0,
        router_aux_loss_coef=coef,
        router_aux_loss_variant=variant,
        **settings,
    )
    return get_mola_model(base, config).train()


def router_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if "lora_router" in name and parameter.grad is not None
    }


def layers_of(model: nn.Module) -> dict[int, list[MolaLayer]]:
    layers: dict[int, list[MolaLayer]] = {}
    for module in model.modules():
        if isinstance(module, MolaLayer) and module.lora_router:
            layers.setdefault(int(module.key.split(".")[2]), []).append(module)
    return layers


def naive(model: MolaModel, variant: str) -> float:
    """Either variant with plain loops over layers, routers, tokens and picks."""
    inputs: dict[str, Tensor] = {}
    hooks = [
        m.register_forward_pre_hook(lambda m, args: inputs.__setitem__(m.key, args[0].detach()))
        for ms in layers_of(model).values()
        for m in ms
    ]
    model(input_ids=IDS, attention_mask=MASK)
    for hook in hooks:
        hook.remove()
    per_layer = []
    for modules in layers_of(model).values():
        routers = []
        for module in modules:
            N, K = module.num_experts["default"], module.top_k["default"]
            counts, sums, tokens = [0] * N, [0.0] * N, 0
            weight = module.lora_router["default"].weight
            for row, mask_row in zip(inputs[module.key], MASK, strict=True):
                for x, counted in zip(row, mask_row.tolist(), strict=True):
                    if variant == "per_router" and not counted:
                        continue
                    p = (weight @ x).softmax(0).tolist()
                    for e in sorted(range(N), key=lambda e: -p[e])[:K]:
                        counts[e] += 1
                    sums = [s + q for s, q in zip(sums, p, strict=True)]
                    tokens += 1
            routers.append((N, counts, sums, tokens))
        if variant == "pooled":
            N = routers[0][0]
            pooled_counts = [sum(r[1][e] for r in routers) for e in range(N)]
            pooled_sums = [sum(r[2][e] for r in routers) for e in range(N)]
            routers = [(N, pooled_counts, pooled_sums, sum(r[3] for r in routers))]
        values = [
            N * sum(c / sum(counts) * s / tokens for c, s in zip(counts, sums, strict=True))
            for N, counts, sums, tokens in routers
        ]
        per_layer.append(sum(values) / len(values))
    return sum(per_layer) if variant == "pooled" else sum(per_layer) / len(per_layer)


@pytest.mark.parametrize("variant", VARIANTS)
def test_balance_loss_equals_the_naive_count(tiny_model: PreTrainedModel, variant: str) -> None:
    model = attach(tiny_model, variant)
    model(input_ids=IDS, attention_mask=MASK)
    expected = naive(model, variant)
    assert model.base_model.balance_loss().item() == pytest.approx(0.5 * expected, rel=1e-5)


def test_the_variants_differ_by_padding_pooling_and_depth(tiny_model: PreTrainedModel) -> None:
    model = attach(tiny_model, "pooled")
    assert naive(model, "pooled") != pytest.approx(2 * naive(model, "per_router"), rel=1e-3)


@pytest.mark.parametrize(("variant", "expected"), [("per_router", 1.0), ("pooled", 3.0)])
def test_uniform_routing_counts_one_per_layer(
    tiny_model: PreTrainedModel, variant: str, expected: float
) -> None:
    model = attach(tiny_model, variant, coef=1.0, experts=(1, 2, 4, 8), top_k=8)
    with torch.no_grad():
        for modules in layers_of(model).values():
            for module in modules:
                module.lora_router["default"].weight.zero_()
    model(input_ids=IDS, attention_mask=MASK)
    assert model.base_model.balance_loss().item() == pytest.approx(expected)


def test_pooling_hides_what_one_router_alone_shows() -> None:
    one = torch.tensor([[9.0, 0.0]]).expand(4, 2)
    loads = [router_load(z, (z > 1).float(), None) for z in (one, one.flip(1))]
    assert balance_loss(loads, pooled=True).item() == pytest.approx(1.0, abs=1e-3)
    assert balance_loss(loads, pooled=False).item() == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpointing_neither_loses_nor_doubles_the_balance_loss(
    tiny_model: PreTrainedModel, variant: str
) -> None:
    model = attach(tiny_model, variant)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_activations(tiny_model, True)
        model.zero_grad()
        loss = model(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss
        loss.backward()
        results.append((loss.detach(), router_gradients(model)))
    assert all(gradient.any() for gradient in results[0][1].values())
    torch.testing.assert_close(results[0], results[1])


def test_reentrant_checkpointing_would_lose_it_and_is_refused(tiny_model: PreTrainedModel) -> None:
    model = attach(tiny_model, "per_router")
    tiny_model.activation_checkpointing_enable({"use_reentrant": True})
    tiny_model.enable_input_require_grads()
    with pytest.raises(ValueError, match="'use_reentrant': False"):
        model(input_ids=IDS, attention_mask=MASK, labels=LABELS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_accumulated_micro_batches_are_the_mean_of_their_losses(
    tiny_model: PreTrainedModel, variant: str, checkpointing: bool
) -> None:
    model = attach(tiny_model, variant)
    if checkpointing:
        checkpoint_activations(tiny_model, True)
    alone = []
    for row in (0, 1):
        model.zero_grad()
        model(input_ids=IDS[[row]], attention_mask=MASK[[row]])
        model.base_model.balance_loss().backward()
        alone.append(router_gradients(model))
    model.zero_grad()
    for row in (0, 1):
        model(input_ids=IDS[[row]], attention_mask=MASK[[row]])
        (model.base_model.balance_loss() / 2).backward()
    accumulated = router_gradients(model)
    expected = {name: (alone[0][name] + alone[1][name]) / 2 for name in accumulated}
    torch.testing.assert_close(accumulated, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_with_the_trainers_count_the_parts_of_a_batch_add_up(
    tiny_model: PreTrainedModel, variant: str
) -> None:
    model = attach(tiny_model, variant)
    tokens = (LABELS[:, 1:] != -100).sum(dim=1)  # 5 and 3
    total, expected = torch.zeros(()), torch.zeros(())
    for row in (0, 1):
        batch = {"input_ids": IDS[[row]], "attention_mask": MASK[[row]], "labels": LABELS[[row]]}
        expected = expected + model(**batch).loss * tokens[row] / tokens.sum()
        total = total + model(**batch, num_items_in_batch=tokens.sum()).loss
    torch.testing.assert_close(total, expected)


def test_a_disabled_adapter_adds_none_left_over_from_before(tiny_model: PreTrainedModel) -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
    plain = tiny_model(**batch).loss
    model = attach(tiny_model, "per_router")
    model(**batch).loss.backward()
    with model.disable_adapter():
        assert torch.equal(model(**batch).loss, plain)


def test_it_joins_the_loss_of_a_tuple_too(tiny_model: PreTrainedModel) -> None:
    model = attach(tiny_model, "per_router")
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
    torch.testing.assert_close(model(**batch, return_dict=False)[0], model(**batch).loss)
    assert model(input_ids=IDS, attention_mask=MASK, return_dict=False)[0].dim() == 3


def test_the_variant_is_saved_and_unknown_ones_are_refused(
    tiny_model: PreTrainedModel, tmp_path: Any
) -> None:
    attach(tiny_model, "pooled").save_pretrained(tmp_path)
    assert '"router_aux_loss_variant": "pooled"' in (tmp_path / "adapter_config.json").read_text()
    with pytest.raises(ValueError, match="variant='mean' of the MoLA config must be per_router or"):
        MolaConfig(experts=(2,), router_aux_loss_variant="mean")


@pytest.mark.parametrize("variant", VARIANTS)
def test_of_two_active_adapters_the_one_that_weighs_most_is_balanced(
    tiny_model: PreTrainedModel, variant: str
) -> None:
    """Fresh experts add nothing, so that the other adapter does not change what a router reads."""
    model = attach(tiny_model, variant)
    model(input_ids=IDS, attention_mask=MASK)
    alone = model.base_model.balance_loss()
    for name, experts, coef in (("light", (2, 2, 2, 2), 0.1), ("none", (1, 3, 4, 2), 0.0)):
        model.add_adapter(
            name, MolaConfig(experts=experts, lora_dropout=0.0, router_aux_loss_coef=coef)
        )
        model.base_model.set_adapter([name, "default"])
        model(input_ids=IDS, attention_mask=MASK)
        torch.testing.assert_close(model.base_model.balance_loss(), alone)
        model.base_model.set_adapter(["default", name])
        model(input_ids=IDS, attention_mask=MASK)
        torch.testing.assert_close(model.base_model.balance_loss(), alone)
