"""Layers that read the same input share the work, and never each other's results."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from mola.config import MolaConfig
from mola.layer import MolaLayer
from mola.routing import Routing, RoutingRecord
from mola.siblings import Siblings


def make_layers(num_experts: int = 3, dropout: float = 0.0, coef: float = 0.0) -> list[MolaLayer]:
    config = MolaConfig(
        experts=(num_experts,), r=2, lora_dropout=dropout, init_seed=0, router_aux_loss_coef=coef
    )
    layers = []
    for number, name in enumerate(("q", "k", "v")):
        torch.manual_seed(number)
        base = nn.Linear(6, 4 + number).requires_grad_(False)
        layer = MolaLayer(base, "default", config, num_experts, f"layers.0.{name}", Routing())
        nn.init.normal_(layer.lora_B["default"].weight)
        layers.append(layer.double())
    return layers


def related(layers: list[MolaLayer]) -> list[MolaLayer]:
    together = Siblings(layers)
    for layer in layers:
        layer.siblings = together
    return layers


def draw(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 6, dtype=torch.float64, generator=generator).requires_grad_()


def outputs_and_gradients(layers: list[MolaLayer], x: Tensor) -> list[Tensor]:
    outputs = [layer(x) for layer in layers]
    loss = sum((output.square().sum() for output in outputs), torch.zeros(()))
    wanted = [x, *(p for layer in layers for p in layer.parameters() if p.requires_grad)]
    return [*outputs, *torch.autograd.grad(loss, wanted)]


def test_together_they_compute_what_each_computes_alone() -> None:
    for num_experts in (1, 3):
        alone = outputs_and_gradients(make_layers(num_experts), draw())
        shared = outputs_and_gradients(related(make_layers(num_experts)), draw())
        for mine, theirs in zip(shared, alone, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_another_input_is_computed_anew_in_any_order() -> None:
    alone, shared = make_layers(), related(make_layers())
    x, y = draw(1), draw(2)
    for place, tensor in ((0, x), (1, y), (0, y), (2, x), (2, y), (1, x), (1, x)):
        torch.testing.assert_close(shared[place](tensor), alone[place](tensor))


def test_an_input_that_was_changed_in_place_is_computed_anew() -> None:
    alone, shared = make_layers(), related(make_layers())
    x = draw().detach()
    shared[0](x)
    x.mul_(2)
    torch.testing.assert_close(shared[1](x), alone[1](x))


def test_a_pass_without_gradients_does_not_serve_one_with() -> None:
    shared = related(make_layers())
    x = draw()
    with torch.no_grad():
        shared[0](x)
    shared[1](x).sum().backward()
    assert shared[1].lora_A["default"].weight.grad is not None


def test_they_share_one_dropout_mask() -> None:
    layers = related(make_layers(num_experts=1, dropout=0.5))
    with torch.no_grad():
        for layer in layers:  # each passes on what its expert reads
            layer.base_layer.weight.zero_()
            layer.base_layer.bias.zero_()
            layer.lora_A["default"].weight.copy_(layers[0].lora_A["default"].weight)
            layer.lora_B["default"].weight.fill_(1)
    x = draw()
    outputs = [layer.train()(x) for layer in layers]
    torch.testing.assert_close(outputs[1][..., :4], outputs[0])
    assert not torch.equal(layers[0](x), outputs[0])  # the next pass draws another


def test_the_input_is_let_go_once_all_are_served() -> None:
    layers = related(make_layers())
    x = draw()
    gone = weakref.ref(x)
    for layer in layers:
        layer(x)
    del x
    gc.collect()
    assert gone() is None


def test_a_copy_has_siblings_of_its_own_and_nothing_put_aside() -> None:
    layers = nn.ModuleList(related(make_layers()))
    x = draw()
    layers[0](x)  # the others' parts are put aside, with the graph that they hang on
    copies = copy.deepcopy(layers)
    assert [layer.siblings.layers for layer in copies] == [list(copies)] * 3
    for mine, theirs in zip(copies, layers, strict=True):
        torch.testing.assert_close(mine(x), theirs(x))


def test_a_replica_computes_for_itself() -> None:
    """What `nn.DataParallel` runs is a shallow copy of a layer."""
    layers = related(make_layers())
    x = draw()
    replica = copy.copy(layers[1])
    torch.testing.assert_close(replica(x), layers[1](x))


def test_each_thread_has_its_own_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = related(make_layers())
    computed: list[Tensor] = []
    compute = MolaLayer.compute

    def count(layer: MolaLayer, together: list[MolaLayer], x: Tensor, name: str) -> object:
        computed.append(x)
        return compute(layer, together, x, name)

    monkeypatch.setattr(MolaLayer, "compute", count)
    x, y = draw(1), draw(2)
    layers[0](x)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(layers[0], y).result()
        layers[1](x)
        pool.submit(layers[1], y).result()
    assert [id(tensor) for tensor in computed] == [id(x), id(y)]


def test_what_is_measured_is_what_a_layer_was_called_with() -> None:
    alone, shared = make_layers(coef=0.1), related(make_layers(coef=0.1))
    for layers in (alone, shared):
        for layer in layers:
            layer.train().routing.record = RoutingRecord()
        layers[0](draw(1))
        layers[1](draw(2)[:1])
    for mine, theirs in zip(shared[:2], alone[:2], strict=True):
        torch.testing.assert_close(mine.balance, theirs.balance)
        assert mine.balance
        assert mine.routing.record is not None and theirs.routing.record is not None
        assert mine.routing.record.modules() == theirs.routing.record.modules()
    assert not shared[2].balance  # it was not called


def test_an_input_that_wants_a_gradient_later_gets_it() -> None:
    alone, shared = make_layers(), related(make_layers())
    x = draw().detach()
    shared[0](x)
    x.requires_grad_()
    wanted, got = (torch.autograd.grad(layers[1](x).sum(), x)[0] for layers in (alone, shared))
    torch.testing.assert_close(got, wanted)


def test_a_layer_can_be_copied_after_a_training_pass_with_a_balance_loss() -> None:
    layers = nn.ModuleList(related(make_layers(coef=0.1))).train()
    x = draw()
    for layer in layers:
        layer(x)
    for mine, theirs in zip(copy.deepcopy(layers), layers, strict=True):
        assert theirs.balance and not mine.balance
        torch.testing.assert_close(mine(x), theirs(x))
