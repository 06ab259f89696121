"""Train weight matrices by Muon: momentum whose every update is made orthogonal.

On the built-in model it needs fewer tokens than AdamW. All matrices of one shape are updated at
once, which is what makes it cheap for many small ones.

Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon/ (the iteration's coefficients and the scale).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(updates: Tensor, iterations: int = 5) -> Tensor:
    """Bring all singular values close to 1 by a Newton-Schulz iteration.

    Args:
        updates: [matrices, rows, columns], float32.
        iterations: 5 bring them to between 0.7 and 1.2, which is close enough.

    Returns:
        The same shape.
    """
    tall = updates.shape[-2] > updates.shape[-1]
    x: Tensor = updates.mT if tall else updates
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, without weight decay.

    Args:
        params: Matrices only.
        lr: Step size; an update's singular values are about `lr * sqrt(max(1, rows / columns))`.
        momentum: Of the moving average of the gradients.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
                state = self.state[parameters[0]]  # one average for all matrices of the shape
                average = state.setdefault("average", torch.zeros_like(gradients))
                average.lerp_(gradients, 1 - group["momentum"])
                update = orthogonalise(gradients.lerp(average, group["momentum"]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, change in zip(parameters, update, strict=True):
                    parameter.add_(change, alpha=-group["lr"] * scale)
