"""Wrap one linear layer: a frozen base layer plus a routed mixture of LoRA experts.

Notation: B batch · T tokens · N experts of this layer · K = min(top_k, N) · r rank of an expert ·
d_in, d_out features of the base layer. All experts of a layer are stacked: A is [N * r, d_in], B is
[d_out, N * r]; `mola.mixture` computes with them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.pytorch_utils import Conv1D

from mola.config import MolaConfig
from mola.mixture import Gated, draw_dropped, gated_products
from mola.routing import Routing, router_load
from mola.siblings import Siblings


class MolaLayer(nn.Module, BaseTunerLayer):  # type: ignore[misc, unused-ignore]
    """Wrap a linear layer with N LoRA experts and a router.

    With one expert there is no router and the layer is PEFT's LoRA of rank r.

    Args:
        base_layer: The frozen linear layer (`nn.Linear`, Transformers' `Conv1D`, quantised or not).
        adapter_name: PEFT's name of the adapter.
        config: The adapter's configuration.
        num_experts: N of this layer, at least 1.
        key: Name of the module in the model, from which its experts' initial weights follow.
        routing: What the adapter's layers share during a forward pass.
    """

    adapter_layer_names = ("lora_A", "lora_B", "lora_router")
    other_param_names = ("num_experts", "top_k", "r", "scaling", "lora_dropout", "aux_coef")

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: MolaConfig,
        num_experts: int,
        key: str,
        routing: Routing,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.key = key
        self.in_features, self.out_features = linear_shape(base_layer)
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        self.lora_router = nn.ModuleDict()
        self.lora_dropout = nn.ModuleDict()
        self.num_experts: dict[str, int] = {}
        self.top_k: dict[str, int] = {}
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.aux_coef: dict[str, float] = {}
        self.routing = routing
        self.balance: dict[str, Tensor] = {}  # of the last forward pass, by adapter
        self.siblings = Siblings([self])
        self.add_adapter(adapter_name, config, num_experts)
        self.train(base_layer.training)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the last forward pass's balance: a graph hangs on it, and cannot be copied."""
        return {**self.__dict__, "balance": {}}

    def add_adapter(self, adapter_name: str, config: MolaConfig, num_experts: int) -> None:
        """Add fresh experts under a name; B is zero, so the layer's output does not change."""
        rank = num_experts * config.r
        self.num_experts[adapter_name] = num_experts
        self.top_k[adapter_name] = min(config.top_k, num_experts)
        self.r[adapter_name] = config.r
        self.scaling[adapter_name] = config.lora_alpha / config.r
        self.aux_coef[adapter_name] = config.router_aux_loss_coef
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout)
        like = self.get_base_layer()
        self.lora_A[adapter_name] = _empty_linear(self.in_features, rank, like)
        self.lora_B[adapter_name] = _empty_linear(rank, self.out_features, like)
        if num_experts > 1:
            self.lora_router[adapter_name] = _empty_linear(self.in_features, num_experts, like)
        seed = torch.initial_seed() if config.init_seed is None else config.init_seed
        self.reset_adapter(adapter_name, seed)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @torch.no_grad()
    def reset_adapter(self, adapter_name: str, seed: int) -> None:
        """Draw the initial weights: A and router Kaiming-uniform (a = sqrt 5), B zero.

        Each expert has a generator of its own, seeded by (seed, module, expert), so that two
        allocations share the weights of the experts that both have.

        Source: GCYZSL/MoLA, `Linear_MoE.reset_parameters`, for the distribution.
        """
        A = _weight(self.lora_A[adapter_name])
        if A.device.type == "meta":
            return
        r = self.r[adapter_name]
        bound = 1 / math.sqrt(self.in_features)  # what Kaiming-uniform with a = sqrt 5 comes to
        routers = self.lora_router
        router = _weight(routers[adapter_name]) if adapter_name in routers else None
        for expert in range(self.num_experts[adapter_name]):
            generator = torch.Generator().manual_seed(_expert_seed(seed, self.key, expert))
            fresh = torch.empty(r + 1, self.in_features, dtype=torch.float32, device="cpu")
            fresh.uniform_(-bound, bound, generator=generator)
            A[expert * r : (expert + 1) * r] = fresh[:r]
            if router is not None:
                router[expert] = fresh[r]
        _weight(self.lora_B[adapter_name]).zero_()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Add the mixture's output to the base layer's.

        Args:
            x: [..., d_in].
            *args: Passed on to the base layer.
            **kwargs: Passed on to the base layer.

        Returns:
            [..., d_out], in the base layer's output dtype.
        """
        base = self.base_layer
        names = [n for n in self.active_adapters if n in self.lora_A and not self.disable_adapters]
        # where nobody else sees the base layer's output, what is added to it needs no copy
        alone = bool(names) and _unobserved(base)
        result: Tensor = base(x.reshape(-1, x.shape[-1]) if alone else x, *args, **kwargs)
        for name in names:
            result = self._add_mixture(result, x, name, in_place=alone)
        return result.view(*x.shape[:-1], self.out_features) if alone else result

    def _add_mixture(self, result: Tensor, x: Tensor, name: str, *, in_place: bool) -> Tensor:
        gated, logits, share = self.siblings.gated(self, x, name)
        if logits is not None and share is not None:
            self._measure(logits, share, name)
        B = _weight(self.lora_B[name]).to(gated.dtype)
        if in_place and result.dtype == gated.dtype:
            return result.addmm_(gated, B.t())
        with torch.autocast(x.device.type, enabled=False):
            mixture = gated @ B.t()
        return result + mixture.to(result.dtype).view(result.shape)

    def compute(self, layers: list[MolaLayer], x: Tensor, name: str) -> Iterator[Gated]:
        """Compute the gated low-rank products of layers that read the same input.

        Args:
            layers: With equal settings, this one among them.
            x: [..., d_in].
            name: The adapter's name.

        Returns:
            For each of the layers, what `Gated` holds, without the dimension of the modules.
        """
        tokens = x.reshape(-1, x.shape[-1])  # [S, d_in]
        scale, dropped = self.scaling[name], None
        dropout = self.lora_dropout[name]
        assert isinstance(dropout, nn.Dropout)
        if dropout.training and dropout.p > 0:
            dropped = draw_dropped(tokens, dropout.p)
            scale = scale / (1 - dropout.p)
        A = [_weight(layer.lora_A[name]) for layer in layers]
        device = x.device.type
        if torch.is_autocast_enabled(device):
            A = [weight.to(torch.get_autocast_dtype(device)) for weight in A]
        routed = name in self.lora_router
        routers = [_weight(layer.lora_router[name]) for layer in layers] if routed else []
        with torch.autocast(device, enabled=False):
            gated = gated_products(
                tokens, A, routers, top_k=self.top_k[name], scale=scale, dropped=dropped
            )
        missing = [None] * len(layers)
        parts = (missing if part is None else part.unbind(1) for part in gated)
        return map(Gated, *parts)

    def _measure(self, logits: Tensor, share: Tensor, name: str) -> None:
        if self.training and self.aux_coef[name] > 0:
            load = router_load(logits, share, self.routing.token_mask)
            self.balance = {**self.balance, name: load}  # a replica shares the dictionary
        if self.routing.record is not None:
            self.routing.record.add(self.key, logits, share, self.routing.token_mask)


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """Return (d_in, d_out) of a linear layer.

    Raises:
        ValueError: If the module is no linear layer.
    """
    if isinstance(layer, nn.Linear):  # the quantised ones are subclasses
        return layer.in_features, layer.out_features
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    raise ValueError(
        f"MoLA adapts linear layers, but {type(layer).__name__} is none; narrow `target_modules`"
    )


def _empty_linear(d_in: int, d_out: int, like: nn.Module) -> nn.Linear:
    """Make a linear layer on another's device, in float32 or wider, without drawing weights.

    The weights are written by `reset_adapter`; the global generator stays as it is.
    """
    dtype = torch.float64 if _weight(like).dtype == torch.float64 else torch.float32
    linear = nn.Linear(d_in, d_out, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.empty(d_out, d_in, dtype=dtype, device=_weight(like).device))
    return linear


def _unobserved(base: nn.Module) -> bool:
    """Whether a base layer is a plain linear one, without hooks or a `forward` of its own."""
    hooks = (
        base._forward_pre_hooks,
        base._forward_hooks,
        base._backward_pre_hooks,
        base._backward_hooks,
    )
    plain = type(base) is nn.Linear and "forward" not in vars(base)
    return plain and not any(hooks) and not _has_any_global_hook()  # type: ignore[no-untyped-call]


def _weight(linear: nn.Module) -> Tensor:
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight


def _expert_seed(seed: int, key: str, expert: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{key}/{expert}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
