"""Check the shape of what a study holds, which another program may have written.

Every reader of a study gets its attributes through here: a file that somebody sends may hold
anything, and what does not fit is one line rather than a traceback from the middle of a report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mola.allocation import MAX_EXPERTS
from studies.strict import shown

Check = Callable[[Any], bool]


def whole(value: Any) -> bool:
    """Whether it is an integer; a bool is none."""
    return type(value) is int


def number(value: Any) -> bool:
    """Whether it is a finite number."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def text(value: Any) -> bool:
    """Whether it is a text."""
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """Whether it is true or false."""
    return isinstance(value, bool)


def optional(check: Check) -> Check:
    """Let None pass, too."""
    return lambda value: value is None or check(value)


def each(check: Check) -> Check:
    """Ask for a list of such values; a study in memory keeps what JSON would make a list."""
    return lambda value: isinstance(value, (list, tuple)) and all(map(check, value))


def texts(value: Any) -> bool:
    """Whether it is an object whose values are texts."""
    return isinstance(value, dict) and all(map(text, value.values()))


def experts(num_layers: int) -> Check:
    """Ask for an allocation of a model of so many layers."""
    counts = each(lambda n: whole(n) and 0 <= n <= MAX_EXPERTS)
    return lambda value: counts(value) and len(value) == num_layers


def require(value: Any, shape: Mapping[str, Check], where: str) -> None:
    """Refuse an object that lacks a key, or whose value there is not what is expected.

    Args:
        value: As it was read. It may have further keys.
        shape: What the value of each key must be.
        where: Names the object in the message.

    Raises:
        ValueError: Names the first key that is wrong.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {shown(value)}; {_ADVICE}")
    for key, check in shape.items():
        if key not in value:
            raise ValueError(f"{where} lacks {key}; {_ADVICE}")
        if not check(value[key]):
            raise ValueError(f"{where}.{key} cannot be {shown(value[key])}; {_ADVICE}")


_ADVICE = "another program or version wrote it"
