"""Measure how the routers spread the tokens: the balance loss and the routing statistics.

Notation: N experts of a layer · K = min(top_k, N) · f_e the fraction of the picks that went to
expert e (they sum to 1) · P_e its mean probability.

The balance loss of one router is the Switch loss (arXiv 2101.03961, equation 4) with f normalised
over the K picks: `N * sum_e f_e P_e`, 1 when the router is uniform and N when it has collapsed.
There are two ways to add it up, `MolaConfig.router_aux_loss_variant`:

- `per_router`, the default: each router by itself, so that one cannot hide another's imbalance;
  padding left out; mean over the routers of a layer, then over the layers that route. 1 at uniform.
- `pooled`: f and P over all tokens of all routers of a layer, padding included, summed over the
  layers that route; at uniform, their number. Source: GCYZSL/MoLA, `load_balancing_loss_func`. A
  layer of one expert adds a constant 1 there, which has no gradient and is left out here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Routing:
    """What the layers of one adapter share during a forward pass.

    Attributes:
        token_mask: [B, T], true where a token is none of the padding; None counts every token.
            A pass over another number of tokens (as in generation) counts every token too.
        record: Statistics in the making; None outside of `mola.model.record_routing`.
    """

    def __init__(self) -> None:
        self.token_mask: Tensor | None = None
        self.record: RoutingRecord | None = None


def router_load(logits: Tensor, share: Tensor, token_mask: Tensor | None) -> Tensor:
    """Return what one router's balance loss is made of.

    Args:
        logits: [..., N] in float32.
        share: [..., N], the gates; non-zero for the picked experts.
        token_mask: [...] without the last dimension, or None.

    Returns:
        [2, N]: f, which has no gradient, and P.
    """
    num_experts = logits.shape[-1]
    probabilities = logits.softmax(dim=-1).reshape(-1, num_experts)  # [B*T, N]
    picked = (share.detach() > 0).to(probabilities.dtype).reshape(-1, num_experts)
    if token_mask is not None and token_mask.numel() == probabilities.shape[0]:
        weight = token_mask.reshape(-1, 1).to(probabilities.dtype)
        probabilities, picked = probabilities * weight, picked * weight
        tokens = weight.sum().clamp(min=1)
    else:
        tokens = torch.tensor(float(max(probabilities.shape[0], 1)), device=logits.device)
    fraction = picked.sum(dim=0) / picked.sum().clamp(min=1)
    return torch.stack([fraction, probabilities.sum(dim=0) / tokens])


def balance_loss(loads: list[Tensor], *, pooled: bool) -> Tensor:
    """Return the balance loss of one layer: 1 when it is uniform.

    Args:
        loads: Of each router of the layer, [2, N] from `router_load`.
        pooled: Whether the routers are measured together. All see the same tokens, and each picks
            K experts for each, so that the pooled f and P are the means of theirs.
    """
    stacked = torch.stack(loads)  # [routers, 2, N]
    if pooled:
        stacked = stacked.mean(dim=0, keepdim=True)
    fraction, probability = stacked.unbind(dim=1)
    return stacked.shape[-1] * (fraction * probability).sum(dim=-1).mean()


class RoutingRecord:
    """Sum up, per module, what its router did to the tokens of several forward passes."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def add(self, key: str, logits: Tensor, share: Tensor, token_mask: Tensor | None) -> None:
        """Add one forward pass of one module; arguments as for `router_load`."""
        num_experts = logits.shape[-1]
        share = share.reshape(-1, num_experts).float()
        log_p = logits.reshape(-1, num_experts).float().log_softmax(dim=-1)
        if token_mask is not None and token_mask.numel() == share.shape[0]:
            keep = token_mask.reshape(-1)
            share, log_p = share[keep], log_p[keep]
        sums = self._sums.setdefault(
            key,
            {
                "load": torch.zeros(num_experts, device=share.device),
                "gate": torch.zeros(num_experts, device=share.device),
                "entropy": torch.zeros((), device=share.device),
                "tokens": torch.zeros((), device=share.device),
            },
        )
        sums["load"] += (share > 0).sum(dim=0)
        sums["gate"] += share.sum(dim=0)
        sums["entropy"] += -(log_p.exp() * log_p).sum()
        sums["tokens"] += share.shape[0]

    def modules(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of each module.

        Returns:
            Per module name: `load` [N], the fraction of the tokens that each expert took; `gate`
            [N], the mean gate; `entropy`, the mean entropy of the router in nats (ln N at most).
        """
        result: dict[str, dict[str, Any]] = {}
        for key, sums in self._sums.items():
            tokens = max(float(sums["tokens"]), 1.0)
            result[key] = {
                "load": (sums["load"] / tokens).tolist(),
                "gate": (sums["gate"] / tokens).tolist(),
                "entropy": float(sums["entropy"]) / tokens,
            }
        return result
