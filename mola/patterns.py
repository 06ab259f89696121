"""Tell regular expressions that are matched quickly from those that may take for ever.

An adapter's configuration may come from anywhere, and PEFT matches its patterns with each module's
name. Python's matcher goes back and tries each way in which the parts of a pattern can share out a
name: of `(a+)+$` these are 2^n for n letters, and no signal or thread ends it. So the ways are
counted before, from above: as if every character matched every other one.

Notation: N characters of a name; ways: [N + 1], in how many ways a part takes 0 to N characters.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

LONGEST = 10_000  # characters of a pattern
NAME = 100  # characters of a module's name, at most; the longest known have about 70
MOST_WAYS = 5e6
"""Room for four unbounded repeats in a row, of which a name has (NAME + 4 over 4) = 4,598,126 ways:
at most a tenth of a second for a name, and seconds for the hundreds of a model."""

Ways = NDArray[np.float64]

_parse = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse").parse
_CHARACTERS = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_PLENTY = 1e30  # beyond which nothing need be told apart; its square is still finite


def is_quick(pattern: str) -> bool:
    """Whether a pattern is a regular expression that is matched quickly with any module's name."""
    if len(pattern) > LONGEST:
        return False
    try:
        re.compile(pattern)
        return bool(_in_turn(_parse(pattern)).sum() <= MOST_WAYS)
    except (re.error, RecursionError, OverflowError):
        return False


def _takes(characters: int, ways: float = 1.0) -> Ways:
    """Count for a part that takes a certain number of characters."""
    counted = np.zeros(NAME + 1)
    counted[min(characters, NAME)] = ways
    return counted


def _then(first: Ways, second: Ways) -> Ways:
    return np.minimum(np.convolve(first, second)[: NAME + 1], _PLENTY)


def _in_turn(parts: Sequence[tuple[Any, Any]]) -> Ways:
    """Count for parts that follow each other, as Python's parser gives them."""
    return reduce(_then, (_part(op.name, argument) for op, argument in parts), _takes(0))


def _part(op: str, argument: Any) -> Ways:
    if op in _CHARACTERS:
        return _takes(1)
    if op in ("AT", "FAILURE"):
        return _takes(0)
    if op in _REPEATS:
        return _repeated(*argument)
    if op == "SUBPATTERN":
        return _in_turn(argument[-1])
    if op == "ATOMIC_GROUP":
        return _in_turn(argument)
    if op in ("ASSERT", "ASSERT_NOT"):
        return _takes(0, _in_turn(argument[1]).sum())
    if op == "BRANCH":
        return _one_of(argument[1])
    if op == "GROUPREF":  # what the group took, which may be nothing
        return _takes(0)
    if op == "GROUPREF_EXISTS":
        return sum((_in_turn(way) for way in argument[1:] if way is not None), _takes(0))
    return _takes(0, _PLENTY)  # unknown to this version


def _repeated(least: int, most: int, parts: Sequence[tuple[Any, Any]]) -> Ways:
    """Count over the numbers of repeats that a name has room for."""
    one, total = _in_turn(parts), np.zeros(NAME + 1)
    times = _takes(0)
    for repeats in range(min(most, max(least, NAME)) + 1):
        if repeats >= least:
            total = np.minimum(total + times, _PLENTY)
        if not times.any() or times.max() >= _PLENTY:  # no room, or too many already
            return total + times
        times = _then(times, one)
    return total


def _one_of(branches: Sequence[Any]) -> Ways:
    """Count over alternatives; of plain texts those match together that begin each other."""
    if any(op.name != "LITERAL" for branch in branches for op, _ in branch):
        return np.minimum(sum(map(_in_turn, branches), np.zeros(NAME + 1)), _PLENTY)
    texts = Counter("".join(chr(code) for _, code in branch) for branch in branches)
    together = max(sum(texts[text[:end]] for end in range(len(text) + 1)) for text in texts)
    return _takes(min(map(len, texts)), together)
