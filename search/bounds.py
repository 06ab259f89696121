"""Read bounds per layer from the command line: `--min-experts`, `--max-experts`, `--fix`."""

from __future__ import annotations

import re
from typing import Any

import click

from mola.allocation import Allocation, ExpertBudget
from studies.strict import shown

Bound = int | tuple[int, ...]


class BudgetList(click.ParamType[int | tuple[int, ...]]):
    """A number of experts over all layers, or several with commas: `160`, `96,128,160`."""

    name = "N[,N...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[int, ...]:
        """Give a number, or several in the order given."""
        items = value if isinstance(value, (list, tuple)) else str(value).split(",")
        texts = [str(item).strip() for item in items]
        totals = tuple(int(text) for text in texts if re.fullmatch(r"\d{1,300}", text, re.ASCII))
        if not totals or len(totals) < len(texts) or not all(totals):
            shown = ",".join(texts)
            self.fail(f"{shown!r} is not a whole number from 1, or several with commas", param, ctx)
        if len(set(totals)) < len(totals):
            self.fail(f"{','.join(texts)!r} has a budget twice", param, ctx)
        return totals if len(totals) > 1 else totals[0]


class PerLayer(click.ParamType[Bound]):
    """One whole number for all layers, or one per layer: `1,1,2,2` or `1x16 2x16`.

    Args:
        least: smallest single number.
    """

    name = "N|LIST"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Bound:
        """Give a number or a tuple; text with one number alone is a number."""
        try:
            text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            counts = Allocation.parse(text).experts
        except ValueError as error:
            self.fail(str(error).replace("allocation", "list"), param, ctx)
        if len(counts) > 1 or isinstance(value, (list, tuple)):
            return counts
        if counts[0] < self.least:
            self.fail(f"{counts[0]} is less than {self.least}", param, ctx)
        return counts[0]


class Fixed(click.ParamType[tuple[tuple[int, int], ...]]):
    """Layers with a number of experts that is not searched: `0=2,31=8`."""

    name = "LAYER=N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, int], ...]:
        """Give pairs of layer and number, in ascending order of the layers."""
        terms = value if isinstance(value, (list, tuple)) else re.split(r"[,\s]+", value.strip())
        found: dict[int, int] = {}
        for term in terms:
            if isinstance(term, (list, tuple)):
                term = "=".join(map(shown, term))
            match = re.fullmatch(r"(\d{1,9})=(\d{1,9})", str(term), re.ASCII)
            if match is None:
                self.fail(f"{term!r:.80} is not LAYER=N, such as 0=2", param, ctx)
            layer, number = int(match[1]), int(match[2])
            if found.setdefault(layer, number) != number:
                self.fail(f"layer {layer} is fixed to both {found[layer]} and {number}", param, ctx)
        return tuple(sorted(found.items()))


def make_budget(
    num_layers: int,
    total: int,
    low: Bound,
    high: Bound | None,
    fixed: tuple[tuple[int, int], ...],
) -> ExpertBudget:
    """Make the budget of a search.

    Args:
        num_layers: of the model.
        total: experts over all layers.
        low: fewest experts, of all layers or of each.
        high: most experts, likewise; None is twice the mean, rounded up.
        fixed: layers and their numbers of experts, whatever the bounds say.

    Raises:
        ValueError: there is no such layer or list of layers, or no allocation meets the bounds.
    """
    for flag, bound in (("--min-experts", low), ("--max-experts", high)):
        if isinstance(bound, tuple) and len(bound) != num_layers:
            raise ValueError(
                f"{flag}: expected one number, or one for each of {num_layers} layers, got "
                f"{len(bound)}"
            )
    if not fixed:
        return ExpertBudget(num_layers, total, low, high)
    if fixed[-1][0] >= num_layers:
        raise ValueError(
            f"--fix {fixed[-1][0]}={fixed[-1][1]}: the model's layers are 0 to {num_layers - 1}"
        )
    if high is None:
        high = ExpertBudget(num_layers, total, 0).high
    lows = [low] * num_layers if isinstance(low, int) else list(low)
    highs = [high] * num_layers if isinstance(high, int) else list(high)
    for layer, number in fixed:
        lows[layer] = highs[layer] = number
    return ExpertBudget(num_layers, total, lows, highs)
