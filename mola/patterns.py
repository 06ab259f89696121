"""Tell regular expressions that are matched quickly from those that may take for ever.

An adapter's configuration may come from anywhere, and PEFT matches its patterns with each module's
name. Python's matcher goes back and tries each way in which the parts of a pattern can share out a
name: of `(a+)+$` these are 2^n for n letters, and no signal or thread ends it. So its steps are
counted before, from above: as if every character matched every other one.

Notation: N characters of a name; ways: [N + 1], in how many ways a part takes 0 to N characters;
steps: [N + 1], how often something within the part is tried after it took 0 to N characters.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LONGEST = 10_000  # characters of a pattern
NAME = 100  # characters of a module's name, at most; the longest known have about 70
MOST_STEPS = 5e7
"""Room for four unbounded repeats in a row, of which a name has (NAME + 4 over 4) = 4,598,126 ways,
and for a few parts that are tried after each: tenths of a second for the longest name, and a
quarter of that for those in use."""

_parse = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse").parse
_CHARACTERS = ("LITERAL", "NOT_LITERAL", "ANY")
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class _Part(NamedTuple):
    """What a part of a pattern takes and costs; see the notation above."""

    ways: NDArray[np.float64]
    steps: NDArray[np.float64]


def is_quick(pattern: str) -> bool:
    """Whether a pattern is a regular expression that is matched quickly with any module's name."""
    if len(pattern) > LONGEST:
        return False
    try:
        re.compile(pattern)
        _in_turn(_parse(pattern))
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _bounded(ways: NDArray[np.float64], steps: NDArray[np.float64]) -> _Part:
    """Give a part unless it alone costs too much; its end is a step of each way, too.

    Raises:
        OverflowError: It does.
    """
    if ways.sum() + steps.sum() > MOST_STEPS:
        raise OverflowError(f"over {MOST_STEPS:.0f} steps")
    return _Part(ways, steps)


def _takes(characters: int, ways: float = 1.0, steps: float = 1.0) -> _Part:
    """Count for a part that takes a certain number of characters."""
    taken, tried = np.zeros(NAME + 1), np.zeros(NAME + 1)
    taken[min(characters, NAME)] = ways
    tried[0] = steps
    return _bounded(taken, tried)


def _then(first: _Part, second: _Part) -> _Part:
    ways = np.convolve(first.ways, second.ways)[: NAME + 1]
    steps = np.convolve(first.ways, second.steps)[: NAME + 1]
    return _bounded(ways, first.steps + steps)


def _either(parts: Sequence[_Part]) -> _Part:
    """Count for alternatives, of which each is tried."""
    none = _takes(0, ways=0, steps=len(parts))
    ways = sum((part.ways for part in parts), none.ways)
    return _bounded(ways, sum((part.steps for part in parts), none.steps))


def _in_turn(parts: Sequence[tuple[Any, Any]]) -> _Part:
    """Count for parts that follow each other, as Python's parser gives them."""
    counted = _takes(0, steps=0)
    for op, argument in parts:
        if not counted.ways.any():  # a name has no room for what follows
            break
        counted = _then(counted, _part(op.name, argument))
    return counted


def _part(op: str, argument: Any) -> _Part:
    if op in _CHARACTERS:
        return _takes(1)
    if op == "IN":  # may be looked up range by range
        return _takes(1, steps=len(argument))
    if op in ("AT", "FAILURE"):
        return _takes(0)
    if op in _REPEATS:
        return _repeated(*argument)
    if op == "SUBPATTERN":  # its end is noted
        return _then(_in_turn(argument[-1]), _takes(0))
    if op == "ATOMIC_GROUP":
        return _in_turn(argument)
    if op in ("ASSERT", "ASSERT_NOT"):  # left for good as soon as it is decided
        return _takes(0, steps=1 + _in_turn(argument[1]).steps.sum())
    if op == "BRANCH":
        return _one_of(argument[1])
    if op == "GROUPREF":  # what the group took, which may be nothing
        return _takes(0)
    if op == "GROUPREF_EXISTS":
        return _either([_in_turn(way or ()) for way in argument[1:]])
    raise OverflowError(f"{op} is unknown to this version")


def _repeated(least: int, most: int, parts: Sequence[tuple[Any, Any]]) -> _Part:
    """Count over the numbers of repeats that a name has room for.

    Raises:
        OverflowError: They are more than a name has room for, even if most took nothing.
    """
    if least > NAME:
        raise OverflowError(f"{least} repeats are more than a name has characters")
    one = _in_turn(parts)
    if one.ways[0] == one.ways.sum() == 1:  # having taken nothing, Python repeats no more
        tried = min(most, least + 1)
        return _takes(0, tried - least + 1, 1 + tried * (1 + one.steps.sum()))
    times, ways = _takes(0), np.zeros(NAME + 1)
    for repeats in range(min(most, least + NAME) + 1):
        if repeats:
            times = _then(times, one)
        if repeats >= least:
            ways = ways + times.ways
        if not times.ways.any():  # no room for more
            break
    return _bounded(ways, times.steps)


def _one_of(branches: Sequence[Any]) -> _Part:
    """Count over alternatives; of plain texts those match together that begin each other.

    Small letters and capitals are taken for the same, as they are where a flag says so; other than
    those of ASCII may then have more than one partner.
    """
    letters = [argument for branch in branches for op, argument in branch if op.name == "LITERAL"]
    if len(letters) < sum(map(len, branches)) or not all(letter < 128 for letter in letters):
        return _either([_in_turn(branch) for branch in branches])
    texts = Counter("".join(chr(code) for _, code in branch).lower() for branch in branches)
    together = max(sum(texts[text[:end]] for end in range(len(text) + 1)) for text in texts)
    tried = len(branches) + together * max(map(len, texts))
    return _takes(min(map(len, texts)), together, tried)
