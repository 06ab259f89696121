"""Regular expressions from elsewhere: those in use are taken, those that take for ever are not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mola.patterns import NAME, is_quick

REGIONS = "(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
LINEARS = "(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


@pytest.mark.parametrize(
    "pattern",
    [
        "all-linear",
        "q_proj",
        r".*\.(q_proj|v_proj)",
        r".*\.(q|k|v|o)_proj$",
        r"(.*\.)?(q_proj|v_proj)",
        r"model\.layers\.(\d+)\.self_attn\.(q_proj|k_proj|v_proj|o_proj)",
        r"^(?!.*vision).*layers\.(1[0-9]|2[0-3])\..*(_proj|fc[12])$",
        rf".*?(?:language|text).*?{REGIONS}.*?{LINEARS}.*?",
        rf"(?:.*?text.*?{REGIONS}.*?{LINEARS}.*?)|(?:\bmodel\.layers\.[\d]{{1,}}\.{REGIONS}\.{LINEARS})",
        r"(?i)(model\.)*layers\.[0-9]+\.mlp",
        r"(?P<block>h|layers)\.\d{1,3}\.(?P=block)?.*",
        r".*\..*\..*\..*_proj$",
        r"(?i:.*\.(?:mlp|MLP)\.(?:up|down|gate)_proj)",
    ],
)
def test_what_people_use_is_taken(pattern: str) -> None:
    assert is_quick(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a*)*b",
        "([a-z.]+)*!",
        "(a|a)*!",
        "(a|aa)+!",
        "(.|a)*!",
        "(?:(?:a?){40}){40}!",
        "a?" * 40 + "a" * 40,
        "(a{0,9}){0,9}!",
        "(a{1,9}){9}!",
        ".*.*.*.*.*.*!",
        ".*a" * 6 + "!",
        "(?=(a+)+!)a",
        "(?!(a+)+!)a",
        "(?:a|a|a)" * 30 + "!",
        r"(a)?(?(1)(a+)+|b)!",
        "(?:){1000000}x",
        "(?:(?:.{100})?){1000000}",
        "(?:(?:(?:(?:^){100}){100}){100}){100}!",
        ".*.*.*.*" + "(?=)" * 2400 + r"\d$",
        ".*.*.*.*" + "()" * 1000 + "!",
        ".*" * 10 + "." * 95 + "!",
        "(?i)" + "(?:qv|QV|Qv|qV)" * 16 + "!",
        "(?i:" + "(?:qv|QV|Qv|qV)" * 16 + "!)",
        "(?i)" + "(?:sk|\u017f\u212a)" * 25 + "!",
        "x" * 10_001,
        "(" * 5000 + ")" * 5000,
        "(",
    ],
)
def test_what_may_take_for_ever_is_not(pattern: str) -> None:
    assert not is_quick(pattern)


PATTERNS = st.recursive(
    st.sampled_from(["a", ".", "[ab]", "b", "", "^", r"\b"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=5).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{2,}", "{0,3}", "{5}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=12,
)


@pytest.mark.timeout(120)  # each match that is not quick would take longer than that
@given(PATTERNS)
def test_what_is_taken_is_matched_quickly(pattern: str) -> None:
    if is_quick(pattern):
        for name in ("a" * NAME, "a" * NAME + "!", "ab" * (NAME // 2) + "!"):
            re.fullmatch(pattern, name)
