"""Allocations as Optuna parameters: `experts_00`, `experts_01`, ..., one integer per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.distributions import IntDistribution

from mola.allocation import Allocation, ExpertBudget


def param_names(num_layers: int) -> list[str]:
    """Name the parameters, layer 0 first, zero-padded so that they sort as text."""
    width = max(2, len(str(num_layers - 1)))
    return [f"experts_{layer:0{width}d}" for layer in range(num_layers)]


def distributions(budget: ExpertBudget) -> dict[str, IntDistribution]:
    """Give each layer's parameter its range. The total is not part of it: Optuna has no sums."""
    names = param_names(budget.num_layers)
    return {
        name: IntDistribution(low, high)
        for name, low, high in zip(names, budget.lows, budget.highs, strict=True)
    }


def to_params(allocation: Allocation) -> dict[str, int]:
    """Write an allocation as parameters."""
    return dict(zip(param_names(allocation.num_layers), allocation.experts, strict=True))


def from_params(params: Mapping[str, Any]) -> Allocation:
    """Read an allocation from a trial's parameters.

    Raises:
        ValueError: the parameters are not exactly one count per layer.
    """
    names = param_names(len(params))
    if not params or set(names) != set(params):
        odd = sorted(set(params) - set(names)) or ["none at all"]
        raise ValueError(
            f"expected the parameters {names[0] if names else 'experts_00'}, ..., one per layer "
            f"without a gap; got {', '.join(map(str, odd[:3]))}"
        )
    return Allocation([params[name] for name in names])
