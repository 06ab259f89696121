"""The experts' products: gradients, modules together as one by one, dropout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mola.mixture import draw_dropped, drop_, gated_products

S, D_IN, R = 4, 5, 2


def weights(modules: int, num_experts: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(num_experts)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return drawn.requires_grad_()

    A = [draw(num_experts * R, D_IN) for _ in range(modules)]
    routers = [draw(num_experts, D_IN) for _ in range(modules)] if num_experts > 1 else []
    return draw(S, D_IN), A, routers


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 2), (2, 2), (4, 1), (5, 2), (5, 3)])
@pytest.mark.parametrize("dropped", [None, torch.tensor([0, 7, 19])])
def test_gradients_equal_finite_differences(
    modules: int, num_experts: int, top_k: int, dropped: Tensor | None
) -> None:
    x, A, routers = weights(modules, num_experts)

    def run(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        gated = gated_products(
            x, parameters[:modules], parameters[modules:],
            top_k=top_k, scale=1.7, dropped=dropped,
        )  # fmt: skip
        return (gated.products,) if gated.logits is None else (gated.products, gated.logits)

    assert torch.autograd.gradcheck(run, (x, *A, *routers))


def test_modules_together_equal_modules_one_by_one() -> None:
    x, A, routers = weights(3, 4)
    together = gated_products(x, A, routers, top_k=2, scale=2.0)
    assert together.logits is not None and together.gates is not None
    for i in range(3):
        alone = gated_products(x, A[i : i + 1], routers[i : i + 1], top_k=2, scale=2.0)
        assert alone.logits is not None and alone.gates is not None
        torch.testing.assert_close(together.products[:, i], alone.products[:, 0])
        torch.testing.assert_close(together.logits[:, i], alone.logits[:, 0])
        torch.testing.assert_close(together.gates[:, i], alone.gates[:, 0])


def test_an_input_without_gradient_still_trains_the_experts() -> None:
    x, A, routers = weights(1, 3)
    gated_products(x.detach(), A, routers, top_k=2, scale=1.0).products.sum().backward()
    assert A[0].grad is not None and routers[0].grad is not None


@given(rows=st.integers(0, 40), p=st.floats(1e-4, 0.999), seed=st.integers(0, 99))
@settings(deadline=None)
def test_dropped_positions_are_ascending_and_inside(rows: int, p: float, seed: int) -> None:
    torch.manual_seed(seed)
    positions = draw_dropped(torch.zeros(rows, 7), p).tolist()
    assert positions == sorted(set(positions))
    assert all(0 <= position < 7 * rows for position in positions)


@pytest.mark.parametrize("p", [0.01, 0.05, 0.5, 0.9])
def test_as_many_elements_are_dropped_as_wanted_and_everywhere(p: float) -> None:
    """Six standard deviations of a binomial count, ten times: fails once in 1e7 seeds."""
    torch.manual_seed(3)
    x = torch.zeros(1000, 1000)
    drop_(x.add_(1), draw_dropped(x, p))
    for part in x.view(10, -1):
        missing = part.numel() - float(part.sum())
        spread = math.sqrt(part.numel() * p * (1 - p))
        assert abs(missing - p * part.numel()) < 6 * spread
    neighbours = float(((x[:, 1:] == 0) & (x[:, :-1] == 0)).sum())  # elements drop on their own
    pairs = x[:, 1:].numel()
    assert abs(neighbours - p * p * pairs) < 12 * math.sqrt(pairs * p * p)


def test_dropping_follows_the_default_generator() -> None:
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(draw_dropped(torch.zeros(50, 50), 0.1).tolist())
    assert draws[0] == draws[1] != draws[2]


def test_dropping_does_not_depend_on_torchs_defaults() -> None:
    x = torch.zeros(50, 50)
    torch.manual_seed(1)
    expected = draw_dropped(x, 0.1)
    torch.manual_seed(1)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert torch.equal(draw_dropped(x, 0.1), expected)
    finally:
        torch.set_default_dtype(default)
