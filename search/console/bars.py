"""Draw allocations as text, one character or one line per layer."""

from __future__ import annotations

from mola.allocation import Allocation

_HEIGHTS = " ▁▂▃▄▅▆▇█"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def spark(allocation: Allocation, highest: int, encoding: str = "utf-8") -> str:
    """Draw the experts over depth, layer 0 first: `▂▂▄▄▆▆██`.

    Args:
        allocation: what to draw.
        highest: number of experts that fills a character's height, at least 1.
        encoding: of the terminal; one without block characters gets digits.

    Returns:
        One character per layer.
    """
    if not _drawable(encoding):
        return "".join(_DIGITS[min(n, len(_DIGITS) - 1)] for n in allocation.experts)
    top = len(_HEIGHTS) - 1
    # Any expert at all is visible: only 0 is blank.
    return "".join(_HEIGHTS[min(top, -(-n * top // highest))] for n in allocation.experts)


def chart(allocation: Allocation, encoding: str = "utf-8") -> str:
    """Draw a line per layer whose length is its number of experts."""
    mark = "█" if _drawable(encoding) else "#"
    width = len(str(allocation.num_layers - 1))
    scale = max(1, -(-max(allocation.experts) // 40))  # a bar is at most 40 characters long
    return "\n".join(
        f"  layer {layer:>{width}}  {mark * -(-n // scale)} {n}"
        for layer, n in enumerate(allocation.experts)
    )


def _drawable(encoding: str) -> bool:
    try:
        _HEIGHTS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
