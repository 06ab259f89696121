"""What a search prints at its end."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from test_search_conclude import FOUND, OTHER, SPEC, TRIANGLE, UNIFORM, conclusion

from search.console.results import comparison, footnotes


def printed(result: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(comparison(result))
    return out.getvalue()


def test_who_dropped_out_is_marked() -> None:
    result = conclusion(
        {
            UNIFORM: [1.2, 1.3, 1.1, 1.2],
            FOUND: [1.1, 1.2, 1.0, 1.1],
            OTHER: [0.1, 1.9, 1.7, None],
        }
    )
    text = printed(result)
    assert re.search(r"^ *out +trial 20 ", text, re.MULTILINE)
    assert any(line.startswith("out: clearly behind") for line in footnotes(result, SPEC))
    whole = conclusion({UNIFORM: [1.0] * 4, FOUND: [1.1, 1.2, 1.0, 1.1]})
    assert "out" not in printed(whole)
    assert not any(line.startswith("out:") for line in footnotes(whole, SPEC))


@pytest.mark.parametrize(
    ("triangle", "advice"), [([2.0, 2.1, 1.9, 2.0], False), ([1.0, 1.3, 0.7, 1.2], True)]
)
def test_too_much_noise_is_said_with_what_to_do(triangle: list[float], advice: bool) -> None:
    result = conclusion({UNIFORM: [1.0, 1.1, 0.9, 1.0], TRIANGLE: triangle})
    text = "\n".join(footnotes(result, SPEC))
    assert "signal to noise: the named allocations differ by" in text
    assert ("much noise: raise --steps" in text) == advice


def test_nothing_is_said_of_a_noise_that_is_unknown() -> None:
    lines = footnotes(conclusion({UNIFORM: [1.0, 1.1, 0.9, 1.0]}), SPEC)
    assert not any("noise" in line for line in lines)
