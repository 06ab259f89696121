"""The adapters that the benchmarks compare, each put into a model of its own.

Notation: S tokens of a batch · N experts · K = min(top_k, N) · r rank · d_in, d_out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from mola.allocation import Allocation
from mola.config import MolaConfig
from mola.model import get_mola_model
from mola.tuner import find_blocks, linear_suffixes

R, ALPHA, DROPOUT, TOP_K = 8, 16, 0.05, 2


class LoopLayer(nn.Module):
    """MoLA with a loop over the experts, each fed with the tokens that were routed to it.

    Computes what GCYZSL/MoLA's `Linear_MoE` does, with its host synchronisation per expert.
    """

    def __init__(self, base: nn.Linear, num_experts: int) -> None:
        super().__init__()
        self.base, self.num_experts = base, num_experts
        device = base.weight.device
        self.router = nn.Linear(base.in_features, num_experts, bias=False, device=device)
        self.down = nn.ModuleList(
            nn.Linear(base.in_features, R, bias=False, device=device) for _ in range(num_experts)
        )
        self.up = nn.ModuleList(
            nn.Linear(R, base.out_features, bias=False, device=device) for _ in range(num_experts)
        )
        for up in self.up:
            nn.init.normal_(up.weight, std=1 / math.sqrt(R))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d_in] to [..., d_out]."""
        result = self.base(x)
        tokens = x.reshape(-1, x.shape[-1])  # [S, d_in]
        share = self.router(tokens.float()).softmax(dim=-1)
        weight, chosen = share.topk(min(TOP_K, self.num_experts), dim=-1)  # [S, K]
        weight = (weight / weight.sum(dim=-1, keepdim=True)).to(x.dtype)
        picked = F.one_hot(chosen, self.num_experts).permute(2, 1, 0)  # [N, K, S]
        mixture = torch.zeros(len(tokens), result.shape[-1], dtype=x.dtype, device=x.device)
        for expert in range(self.num_experts):
            slot, token = torch.where(picked[expert])
            if len(token) == 0:
                continue
            rows = tokens[token.tolist()]
            out = self.up[expert](self.down[expert](F.dropout(rows, DROPOUT, self.training)))
            gate = weight[token.tolist(), slot.tolist(), None]
            mixture.index_add_(0, token, (out * (ALPHA / R) * gate).to(x.dtype))
        return result + mixture.view_as(result)


def attach_loop(model: PreTrainedModel, allocation: Allocation) -> nn.Module:
    """Put `LoopLayer`s around all linear layers of the blocks."""
    model.requires_grad_(False)
    _, blocks = find_blocks(model)
    suffixes = linear_suffixes(blocks)
    for block, num_experts in zip(blocks, allocation.experts, strict=True):
        for suffix in suffixes:
            parent, _, name = suffix.rpartition(".")
            module = block.get_submodule(parent)
            setattr(module, name, LoopLayer(getattr(module, name), num_experts))
    return model


def attach_mola(model: PreTrainedModel, allocation: Allocation) -> nn.Module:
    """Put this project's adapter into the model; B is drawn, so that no product is with zeros."""
    config = MolaConfig(
        experts=allocation, r=R, lora_alpha=ALPHA, lora_dropout=DROPOUT, top_k=TOP_K, init_seed=0
    )
    adapted = get_mola_model(model, config)
    _draw(adapted, ".lora_B.")
    return adapted


def attach_lora(model: PreTrainedModel, rank: int) -> nn.Module:
    """Put PEFT's LoRA of some rank into the model."""
    suffixes = linear_suffixes(find_blocks(model)[1])
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=DROPOUT, target_modules=list(suffixes)
    )
    adapted = get_peft_model(model, config)
    _draw(adapted, ".lora_B.")
    return adapted


def attach_nothing(model: PreTrainedModel) -> nn.Module:
    """Freeze the model and let the gradient flow to its input: the floor of any adapter."""
    model.requires_grad_(False)
    model.enable_input_require_grads()
    return model


def variants(allocation: Allocation) -> dict[str, Callable[[PreTrainedModel], nn.Module]]:
    """Return what is compared: names with what puts the adapter into a model."""
    mean = round(allocation.total / allocation.num_layers)
    total, active = R * mean, R * min(TOP_K, mean)
    return {
        "MoLA (ours)": lambda model: attach_mola(model, allocation),
        "loop over experts": lambda model: attach_loop(model, allocation),
        f"PEFT LoRA r={total}": lambda model: attach_lora(model, total),
        f"PEFT LoRA r={active}": lambda model: attach_lora(model, active),
        "frozen": attach_nothing,
    }


@torch.no_grad()
def _draw(model: nn.Module, key: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if key in name:
            fresh = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.copy_(fresh.to(parameter))
