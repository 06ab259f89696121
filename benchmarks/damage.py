"""Damage valid input, by its bytes or by the values of its JSON, for benchmarks/fuzz.py."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    10**18,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../etc/passwd",
    "a" * 5000,
    "\x00",
    "\x1b[2J",
    "<script>alert(1)</script>",
    "{0.__class__}",
    "$(id)",
    [],
    [[[[[]]]]],
    {},
    {"a": 1},
    ["x"],
    "2x99999999999",
)
INSERTS = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\r",
    b'"',
    b"{",
    b"[" * 3000,
    b"\xed\xa0\x80",
    b",",
)


def damaged(document: Any, rng: random.Random) -> Any:
    """Change one to three values of a JSON document, at any depth."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(list(_places(document)) or [([document], 0)])
        action = rng.randrange(4)
        if action == 0 and isinstance(holder, dict):
            holder.pop(key, None)
        elif action == 1 and isinstance(holder, dict):
            holder[rng.choice(["odd", "", "format_version", "\x00", "é"])] = rng.choice(ODD)
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    items = document.items() if isinstance(document, dict) else ()
    items = enumerate(document) if isinstance(document, list) else items
    for key, value in list(items):
        yield document, key
        yield from _places(value)


def torn(data: bytes, rng: random.Random) -> bytes:
    """Damage bytes: cut, flip, insert, double, or write them in another encoding."""
    place = rng.randint(0, len(data))
    action = rng.randrange(6)
    if action == 0:
        return data[:place]
    if action == 1 and data:
        place = min(place, len(data) - 1)
        return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
    if action == 2:
        return data[:place] + rng.choice(INSERTS) + data[place:]
    if action == 3:
        return data + data[place:]
    if action == 4:
        return data.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-32", "utf-16-be"]))
    return rng.randbytes(rng.randint(0, 200))
