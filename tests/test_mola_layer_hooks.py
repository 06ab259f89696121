"""What watches a base layer, or stands in for its forward, meets it as if it were not adapted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from mola.config import MolaConfig
from mola.layer import MolaLayer
from mola.routing import Routing

Register = Callable[[nn.Module, Callable[..., None]], Any]


def make_layer() -> MolaLayer:
    torch.manual_seed(0)
    base = nn.Linear(6, 5).requires_grad_(False)
    layer = MolaLayer(base, "default", MolaConfig(experts=(3,)), 3, "layers.0.q", Routing())
    nn.init.normal_(layer.lora_B["default"].weight)
    return layer.double().eval()


def draw() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 6, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize(
    "register",
    [
        lambda base, hook: base.register_forward_hook(hook),
        lambda _, hook: hooks.register_module_forward_hook(hook),
    ],
)
def test_what_a_forward_hook_sees_is_not_written_over(register: Register) -> None:
    layer, x = make_layer(), draw()
    seen: list[Tensor] = []
    with register(layer.base_layer, lambda *call: seen.append(call[-1])):
        output = layer(x)
    base = nn.functional.linear(x, layer.base_layer.weight, layer.base_layer.bias)
    torch.testing.assert_close(seen[0], base)
    assert not torch.equal(output, base)


def test_a_forward_pre_hook_sees_the_input_in_its_shape() -> None:
    layer, x = make_layer(), draw()
    seen: list[torch.Size] = []
    layer.base_layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    layer(x)
    assert seen == [x.shape]


@pytest.mark.parametrize(
    "register",
    [
        lambda base, hook: base.register_full_backward_hook(hook),
        lambda base, hook: base.register_full_backward_pre_hook(hook),
        lambda _, hook: hooks.register_module_full_backward_hook(hook),
    ],
)
def test_backward_hooks_see_the_gradient_and_change_nothing(register: Register) -> None:
    layer, x = make_layer(), draw()
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    seen: list[torch.Size] = []
    with register(layer.base_layer, lambda _, *grads: seen.append(grads[-1][0].shape)):
        got = torch.autograd.grad(layer(x).sum(), x)[0]
    torch.testing.assert_close(got, expected)
    assert torch.Size([2, 3, 5]) in seen


def test_a_forward_of_the_base_layers_own_may_keep_its_output() -> None:
    """Accelerate, among others, puts a `forward` into an instance."""
    layer, x = make_layer(), draw()
    base = layer.base_layer
    with torch.no_grad():
        mixture = layer(x) - base(x)
    forward = base.forward
    base.forward = lambda x: forward(x).tanh()
    torch.testing.assert_close(layer(x), base(x) + mixture)
    layer(x).sum().backward()
    assert x.grad is not None
