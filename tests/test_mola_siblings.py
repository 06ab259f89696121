"""Layers that read the same input share the work, and never each other's results."""

from __future__ import annotations

import copy
import gc
import weakref

import torch
from torch import Tensor, nn

from mola.config import MolaConfig
from mola.layer import MolaLayer
from mola.routing import Routing
from mola.siblings import Siblings


def make_layers(num_experts: int = 3, dropout: float = 0.0) -> list[MolaLayer]:
    config = MolaConfig(experts=(num_experts,), r=2, lora_dropout=dropout, init_seed=0)
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


def test_what_a_hook_sees_of_the_base_layer_is_not_written_over() -> None:
    layer = make_layers()[0]
    seen: list[Tensor] = []
    layer.base_layer.register_forward_hook(lambda *call: seen.append(call[-1]))
    x = draw()
    output = layer(x)
    base = nn.functional.linear(x, layer.base_layer.weight, layer.base_layer.bias)
    torch.testing.assert_close(seen[0], base)
    assert not torch.equal(output, base)


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
