"""Hold a MoLA adapter's configuration, in PEFT's form and with PEFT's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peft import PeftConfig, TaskType

from mola.allocation import Allocation

FORMAT_VERSION = 1


class _PeftTypeName(str):
    """A stand-in for a member of PEFT's closed `PeftType` enum."""

    @property
    def value(self) -> str:
        return str(self)

    @property
    def name(self) -> str:
        return str(self)


MOLA = _PeftTypeName("MOLA")


@dataclass
class MolaConfig(PeftConfig):
    """Configure a MoLA adapter: LoRA's settings, the allocation, and the router's.

    Example:
        >>> MolaConfig(experts="2x8 4x8 6x8 8x8", r=8, lora_alpha=16)  # doctest: +SKIP

    Attributes:
        experts: Experts per layer, layer 0 first. Anything that `Allocation` reads; kept as a
            tuple of integers.
        r: Rank of each expert.
        lora_alpha: The adapter's output is scaled by `lora_alpha / r`.
        lora_dropout: Probability with which an input of the experts is dropped in training.
        target_modules: Names, suffixes or a regular expression, as in PEFT; None is every linear
            layer of the blocks.
        exclude_modules: Modules to leave out, in the same form.
        top_k: Experts that a token is sent to; a layer with fewer uses all of them.
        router_aux_loss_coef: Weight of the balance loss; 0 turns it off.
        modules_to_save: Modules that are trained in full and saved beside the adapter.
        init_seed: Seed of the fresh weights. Expert e of a module starts alike whatever the
            allocation. None takes `torch.initial_seed()`.
        format_version: Version of this file's format.

    Raises:
        ValueError: If a value is out of its range, or the format is newer than this code.
    """

    experts: Any = None
    r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.05
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    top_k: int = 2
    router_aux_loss_coef: float = 0.0
    modules_to_save: list[str] | None = None
    init_seed: int | None = None
    format_version: int = field(default=FORMAT_VERSION)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = MOLA
        self.task_type = self.task_type or TaskType.CAUSAL_LM
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"format_version={self.format_version} of this MoLA adapter is newer than "
                f"{FORMAT_VERSION}, the newest that this version reads; update mola-search"
            )
        self.experts = _as_allocation(self.experts).experts
        for name, value, valid, expected in (
            ("r", self.r, self.r >= 1, "at least 1"),
            ("lora_alpha", self.lora_alpha, self.lora_alpha > 0, "positive"),
            ("lora_dropout", self.lora_dropout, 0 <= self.lora_dropout < 1, "in [0, 1)"),
            ("top_k", self.top_k, self.top_k >= 1, "at least 1"),
            ("router_aux_loss_coef", aux := self.router_aux_loss_coef, aux >= 0, "0 or more"),
        ):
            if not valid:
                raise ValueError(f"{name}={value} of the MoLA config must be {expected}")

    @property
    def allocation(self) -> Allocation:
        """The experts per layer as an `Allocation`."""
        return Allocation(self.experts)


def _as_allocation(experts: Allocation | Sequence[int] | str | None) -> Allocation:
    if experts is None:
        raise ValueError("a MoLA config needs `experts`: the number of experts of each layer")
    if isinstance(experts, Allocation):
        return experts
    if isinstance(experts, str):
        return Allocation.parse(experts)
    return Allocation(tuple(experts))
