"""Hold a MoLA adapter's configuration, in PEFT's form and with PEFT's names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from peft import PeftConfig, TaskType

from mola.allocation import Allocation
from mola.patterns import is_quick
from mola.settings import MAX_RANK

FORMAT_VERSION = 2  # 1 lacks the balance loss's variant and the marks of the base model
QUICK = "(of at most four unbounded repeats, none in another)"
BALANCE_VARIANTS = ("per_router", "pooled")


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
            layer of the blocks. An expression must be matched quickly, see `mola.patterns`.
        exclude_modules: Modules to leave out, in the same form.
        top_k: Experts that a token is sent to; a layer with fewer uses all of them.
        router_aux_loss_coef: Weight of the balance loss; 0 turns it off.
        router_aux_loss_variant: How the balance loss adds up. `per_router` measures each router by
            itself, leaves padding out and averages over the layers, so that its scale does not
            depend on the depth. `pooled` is the reference implementation's: over all routers of a
            layer together, padding included, summed over the layers. See `mola.routing`.
        modules_to_save: Modules that are trained in full and saved beside the adapter.
        init_seed: Seed of the fresh weights. Expert e of a module starts alike whatever the
            allocation. None takes `torch.initial_seed()`.
        base_model_type: Architecture that the adapter belongs to; filled in when it is attached.
        base_weights: A few of the base model's weights, by which another model of the same shapes
            is noticed; filled in likewise.
        format_version: Version of this file's format.

    Raises:
        ValueError: If a value is of the wrong type or out of its range, or the format is newer than
            this code.
    """

    experts: Any = None
    r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.05
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    top_k: int = 2
    router_aux_loss_coef: float = 0.0
    router_aux_loss_variant: str = "per_router"
    modules_to_save: list[str] | None = None
    init_seed: int | None = None
    base_model_type: str | None = None
    base_weights: list[float] | None = None
    format_version: int = field(default=FORMAT_VERSION)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = MOLA
        self.task_type = self.task_type or TaskType.CAUSAL_LM
        if not _is_integer(self.format_version) or self.format_version < 1:
            raise ValueError(f"format_version={self.format_version!r} must be a number from 1")
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"format_version={self.format_version} of this MoLA adapter is newer than "
                f"{FORMAT_VERSION}, the newest that this version reads; update mola-search"
            )
        self.format_version = FORMAT_VERSION  # what it is saved as
        self.experts = _as_allocation(self.experts).experts
        for name, valid, expected in self._requirements():
            if not valid:
                value = repr(getattr(self, name))
                shown = value if len(value) <= 80 else value[:77] + "..."
                raise ValueError(f"{name}={shown} of the MoLA config must be {expected}")

    def _requirements(self) -> Iterator[tuple[str, bool, str]]:
        """Yield (field, whether its value is valid, what is expected)."""
        most = max(self.experts)
        yield "r", _is_integer(self.r) and self.r >= 1, "an integer of at least 1"
        yield "r", most * self.r <= MAX_RANK, f"at most {MAX_RANK} divided by a layer's experts"
        yield "lora_alpha", _is_number(self.lora_alpha) and self.lora_alpha > 0, "positive"
        dropout, aux = self.lora_dropout, self.router_aux_loss_coef
        yield "lora_dropout", _is_number(dropout) and 0 <= dropout < 1, "in [0, 1)"
        yield "top_k", _is_integer(self.top_k) and self.top_k >= 1, "an integer of at least 1"
        yield "router_aux_loss_coef", _is_number(aux) and aux >= 0, "0 or more"
        variant, variants = self.router_aux_loss_variant, " or ".join(BALANCE_VARIANTS)
        yield "router_aux_loss_variant", variant in BALANCE_VARIANTS, variants
        names = f"module names or a regular expression {QUICK}"
        yield "target_modules", _are_modules(self.target_modules), names
        yield "exclude_modules", _are_modules(self.exclude_modules), names
        saved = self.modules_to_save
        quick = saved is None or (_are_names(saved) and _are_quick_suffixes(saved))
        yield "modules_to_save", quick, f"a list of module names, or of regular expressions {QUICK}"
        seed = self.init_seed
        yield "init_seed", seed is None or _is_integer(seed), "an integer or null"
        for name in ("base_model_name_or_path", "base_model_type", "revision"):
            value = getattr(self, name)
            yield name, value is None or isinstance(value, str), "a text or null"
        weights = self.base_weights
        yield "base_weights", weights is None or _are_numbers(weights), "a list of numbers or null"

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
    try:
        return Allocation(tuple(experts))
    except TypeError:
        raise ValueError(
            f"experts={experts!r} of the MoLA config must be one number per layer"
        ) from None


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _are_numbers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_number, value))


def _are_modules(value: object) -> bool:
    return value is None or (is_quick(value) if isinstance(value, str) else _are_names(value))


def _are_names(value: object) -> bool:
    return isinstance(value, (list, tuple, set)) and all(isinstance(v, str) for v in value)


def _are_quick_suffixes(patterns: Sequence[str]) -> bool:
    """Judge `modules_to_save`, which PEFT reads as regular expressions, in this place."""
    together = "|".join(rf"(^|.*\.){pattern}($|\..*)" for pattern in patterns)
    return all(map(is_quick, patterns)) and is_quick(together)
