"""Make MoLA a method of PEFT: the one file that touches PEFT's private interfaces.

PEFT registers only methods that stand in its own `PeftType` enum, so the entry is added to its
three look-up tables directly. Tested with PEFT 0.21.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftConfig
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mola import siblings
from mola.config import MOLA, MolaConfig
from mola.identity import with_base
from mola.layer import MolaLayer
from mola.routing import Routing, balance_loss
from mola.siblings import Siblings


class MolaTuner(BaseTuner):
    """Put MoLA layers into a model. PEFT builds it; users see the `PeftModel` around it."""

    prefix = "lora_"
    tuner_layer_cls = MolaLayer
    target_module_mapping = {}  # noqa: RUF012 - PEFT's own form

    def _pre_injection_hook(self, model: nn.Module, config: PeftConfig, adapter_name: str) -> None:
        assert isinstance(config, MolaConfig)
        if "routing" not in self.__dict__:
            self.routing = Routing()
        self._blocks, blocks = find_blocks(model)
        num_layers = len(blocks)
        if len(config.experts) != num_layers:
            raise ValueError(
                f"the allocation has {len(config.experts)} layers, but the base model has "
                f"{num_layers}; give one number of experts per layer"
            )
        if sum(config.experts) == 0:
            raise ValueError("the allocation has no expert at all; nothing would be trained")
        linears = [
            module
            for name, module in blocks.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) and ".lora_" not in name
        ]
        self.peft_config[adapter_name] = with_base(config, _text_config(model), linears)

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: Any) -> PeftConfig:
        assert isinstance(peft_config, MolaConfig)
        if peft_config.target_modules is None:
            peft_config.target_modules = linear_suffixes(find_blocks(self.model)[1])
        return peft_config

    def _create_and_replace(
        self,
        peft_config: PeftConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        assert isinstance(peft_config, MolaConfig)
        num_experts = peft_config.experts[self._layer_of(current_key)]
        if num_experts == 0:
            return
        if isinstance(target, MolaLayer):
            target.add_adapter(adapter_name, peft_config, num_experts)
            return
        layer = MolaLayer(target, adapter_name, peft_config, num_experts, current_key, self.routing)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _post_injection_hook(self, model: nn.Module, config: PeftConfig, adapter_name: str) -> None:
        assert isinstance(config, MolaConfig)
        if not any(isinstance(m, MolaLayer) and adapter_name in m.r for m in model.modules()):
            raise ValueError(
                "no layer with an expert has a module that `target_modules` names; nothing would "
                "be trained"
            )
        for parent in model.modules():
            for names in siblings.NAMES:
                found = [getattr(parent, name, None) for name in names]
                layers = [layer for layer in found if isinstance(layer, MolaLayer)]
                if len(layers) > 1:
                    together = Siblings(layers)
                    for layer in layers:
                        layer.siblings = together

    def _layer_of(self, key: str) -> int:
        prefix = self._blocks + "."
        if not key.startswith(prefix):
            raise ValueError(
                f"target module {key!r} lies outside of the numbered layers {self._blocks!r}, so "
                "no number of experts belongs to it; narrow `target_modules`"
            )
        return int(key[len(prefix) :].split(".", 1)[0])

    def forward(self, *args: Any, token_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Run the base model; with a balance loss and labels, add it to the output's loss.

        Args:
            *args: The base model's.
            token_mask: [B, T], true where the routers' statistics count a token; None takes the
                attention mask. It holds until the next forward pass, so that gradient
                checkpointing recomputes the same.
            **kwargs: The base model's. With `num_items_in_batch`, which Transformers' `Trainer`
                passes, the labels are a part of a batch, and the balance loss counts in proportion.
        """
        adds_balance = self.training and self.balances
        mask = kwargs.get("attention_mask") if token_mask is None else token_mask
        if adds_balance and self._balanced[1].router_aux_loss_variant == "pooled":
            mask = None
        self.routing.token_mask = mask.bool() if mask is not None and mask.dim() == 2 else None
        if adds_balance:
            for module in self.modules():
                if isinstance(module, MolaLayer):
                    module.balance = {}
        output = self.model(*args, **kwargs)
        if not adds_balance:
            return output
        if isinstance(output, tuple):
            if kwargs.get("labels") is not None:
                loss = output[0] + self.balance_loss() * _part_of_batch(kwargs)
                output = (loss, *output[1:])
        elif getattr(output, "loss", None) is not None:
            output.loss = output.loss + self.balance_loss() * _part_of_batch(kwargs)
        return output

    @property
    def balances(self) -> bool:
        """Whether an active adapter has a balance loss."""
        return self._balanced[1].router_aux_loss_coef > 0

    @property
    def _balanced(self) -> tuple[str, MolaConfig]:
        """The active adapter that weighs the balance loss most: its name and configuration."""
        named = [(name, self.peft_config[name]) for name in self.active_adapters]
        return max(
            ((name, config) for name, config in named if isinstance(config, MolaConfig)),
            key=lambda pair: pair[1].router_aux_loss_coef,
        )

    def balance_loss(self) -> Tensor:
        """Return the last forward pass's balance loss, times its coefficient.

        See `mola.routing` for the variants.

        Raises:
            ValueError: If its gradient is lost to reentrant gradient checkpointing.
        """
        name, config = self._balanced
        per_layer: dict[int, list[Tensor]] = {}
        for module in self.modules():
            if isinstance(module, MolaLayer) and name in module.balance:
                load = module.balance[name]
                per_layer.setdefault(self._layer_of(module.key), []).append(load)
                if torch.is_grad_enabled() and not load.requires_grad:
                    _check_frozen(module)
        if not per_layer:
            return torch.zeros((), device=next(self.parameters()).device)
        pooled = config.router_aux_loss_variant == "pooled"
        device = next(iter(per_layer.values()))[0].device
        losses = torch.stack(
            [
                balance_loss([load.to(device) for load in loads], pooled=pooled)
                for loads in per_layer.values()
            ]
        )
        return (losses.sum() if pooled else losses.mean()) * config.router_aux_loss_coef

    def _check_merge_allowed(self) -> None:
        raise ValueError(
            "a MoLA adapter cannot be merged: each token is routed to experts of its own, so there "
            "is no single weight difference; keep the adapter beside the base model"
        )

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: see `_check_merge_allowed`."""
        self._check_merge_allowed()


def _check_frozen(layer: MolaLayer) -> None:
    """Refuse a balance loss without a gradient whose router is nevertheless trained."""
    if any(p.requires_grad for p in layer.lora_router.parameters()):
        raise ValueError(
            "the balance loss has no gradient under reentrant gradient checkpointing; pass "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


def _part_of_batch(kwargs: dict[str, Any]) -> Tensor | float:
    """Return the part of a batch's label tokens that a forward pass sees, 1 if it sees the batch.

    With `num_items_in_batch` the base model divides its loss by that number, and the losses of the
    micro-batches are added up. Weighted like this, the balance losses add up to their mean.
    """
    items = kwargs.get("num_items_in_batch")
    if items is None:
        return 1.0
    shifted = kwargs.get("shift_labels")
    labels: Tensor = kwargs["labels"][..., 1:] if shifted is None else shifted
    part: Tensor = (labels != -100).sum() / items
    return part


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the list of numbered layers and its name, such as `model.layers`.

    Raises:
        ValueError: If the model has no such list, or more than one.
    """
    num_layers = getattr(_text_config(model), "num_hidden_layers", None)
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    }
    names = [n for n in lists if not any(n.startswith(other + ".") for other in lists)]
    if len(names) != 1:
        raise ValueError(
            f"{type(model).__name__}: MoLA needs a decoder-only model with one list of numbered "
            f"layers, found {len(names)} lists of {num_layers} layers"
        )
    return names[0], lists[names[0]]


def linear_suffixes(blocks: nn.Module) -> list[str]:
    """Return the names of all linear layers inside the blocks, without the layer's number.

    Raises:
        ValueError: If the blocks hold fused expert weights, which no linear layer stands for.
    """
    suffixes: dict[str, None] = {}
    inside: tuple[str, ...] = ()
    for name, module in blocks.named_modules():
        if inside and name.startswith(inside):
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and "conv" not in type(module).__name__.lower():
                raise ValueError(
                    f"the base model is itself a mixture of experts: {name}.{parameter_name} holds "
                    "fused expert weights that no linear layer stands for; adapt its attention "
                    "alone, for example target_modules q_proj, k_proj, v_proj, o_proj"
                )
        if isinstance(module, (nn.Linear, Conv1D, MolaLayer)):
            suffixes[name.split(".", 1)[1]] = None
            inside += (name + ".",)
    return list(suffixes)


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def register() -> None:
    """Tell PEFT about MoLA, so that `get_peft_model` and `PeftModel.from_pretrained` work."""
    PEFT_TYPE_TO_CONFIG_MAPPING[MOLA] = MolaConfig  # type: ignore[index, unused-ignore]
    PEFT_TYPE_TO_TUNER_MAPPING[MOLA] = MolaTuner  # type: ignore[index, unused-ignore]
    PEFT_TYPE_TO_PREFIX_MAPPING[MOLA] = MolaTuner.prefix  # type: ignore[index, unused-ignore]


register()
