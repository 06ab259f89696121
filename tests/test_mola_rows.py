from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mola.rows import _check_row, load_splits

GOOD: dict[str, Any] = {"instruction": "which?", "input": "", "output": "a", "choices": ["a", "b"]}
PLAIN: dict[str, Any] = {"instruction": "which?", "output": "a"}


def write(folder: Path, **splits: list[dict[str, Any]]) -> str:
    for split, rows in splits.items():
        # Each row has a prompt of its own, so that no leak is warned of.
        numbered = [
            {**row, "instruction": f"{split} {i} {row['instruction']}"}
            if isinstance(row.get("instruction"), str) and row["instruction"]
            else row
            for i, row in enumerate(rows)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in numbered))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instruction": 3}, "instruction must be text, got 3"),
        ({"input": ["x"]}, "input must be text, got ['x']"),
        ({"output": None}, "output must be text, got None"),
        ({"output": " \n"}, "output is empty"),
        ({"instruction": ""}, "instruction and input are both empty"),
        ({"output": "\ud800"}, "output holds half a character"),
        ({"choices": "ab"}, "choices must be a list of texts, got 'ab'"),
        ({"choices": ["a", 2]}, "choices[1] must be text, got 2"),
        ({"choices": ["a"]}, "choices needs two or more candidates"),
        ({"choices": []}, "choices needs two or more candidates"),
        ({"choices": ["a", "b", "a"]}, "choices has 'a' twice"),
        ({"choices": ["a", " "]}, "choices[1] is empty"),
        ({"choices": ["A", "b"]}, "the output 'a' is not among the choices ['A', 'b']"),
        ({"choices": None}, "no choices here, some choices in the first row"),
    ],
)
def test_a_wrong_row_is_named_with_file_and_line(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = write(tmp_path, train=[GOOD, {**GOOD, **changes}], validation=[GOOD])
    with pytest.raises(ValueError, match=re.escape(f"train.jsonl:2: {message}")):
        load_splits(data)


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    data = write(tmp_path, train=[{"instruction": "i", "answer": "a"}], validation=[PLAIN])
    with pytest.raises(ValueError, match=r"jsonl:1: column 'output' .*: 'instruction', 'answer'$"):
        load_splits(data)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    anything
    | st.fixed_dictionaries(
        {},
        optional={
            "instruction": anything,
            "input": anything,
            "output": anything,
            "choices": anything,
        },
    )
)
def test_any_json_value_is_a_row_or_one_line(value: object) -> None:
    try:
        row = _check_row("here:1", value)
    except ValueError as error:
        assert re.fullmatch("here:1: .+", str(error))
    else:
        assert isinstance(value, dict)
        assert row.output == value["output"]


def test_choices_may_be_missing_in_train_alone(tmp_path: Path) -> None:
    loaded = load_splits(write(tmp_path, train=[PLAIN], validation=[GOOD], test=[GOOD]))
    assert "choices" not in loaded["train"].column_names
    assert loaded["test"][0]["choices"] == ["a", "b"]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [GOOD], "validation": [PLAIN]}, "train has choices, validation has none"),
        ({"train": [PLAIN], "validation": [GOOD], "test": [PLAIN]}, "only one has choices"),
        ({"train": [PLAIN], "validation": [PLAIN], "test": [GOOD]}, "only one has choices"),
    ],
)
def test_splits_that_disagree_about_choices_are_refused(
    tmp_path: Path, splits: dict[str, list[dict[str, Any]]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_splits(write(tmp_path, **splits))


def test_prompts_of_validation_that_are_in_train_are_counted(tmp_path: Path) -> None:
    for split, prompts in {"train": "abca", "validation": "xabb", "test": "yz"}.items():
        rows = [{"instruction": p, "output": "o"} for p in prompts]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.warns(UserWarning, match="3 of 4 validation rows have a prompt that is in train"):
        load_splits(str(tmp_path))


@pytest.mark.parametrize("odd", ["a\x07b", "a\x1b[2Jb", "a\ufffdb", "a\x9fb"])
@pytest.mark.parametrize("column", ["instruction", "output"])
def test_rows_with_control_characters_are_counted(tmp_path: Path, odd: str, column: str) -> None:
    rows = [PLAIN, {**PLAIN, column: odd}, {**PLAIN, "instruction": "a\tb\r\nc\u2028"}]
    data = write(tmp_path, train=rows, validation=[PLAIN])
    with pytest.warns(UserWarning, match="1 of 3 train rows hold control characters"):
        loaded = load_splits(data)
    assert odd in loaded["train"][1][column]


def test_a_row_with_a_nul_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path, train=[PLAIN, {**PLAIN, "output": "a\0"}], validation=[PLAIN])
    with pytest.raises(ValueError, match=r"train\.jsonl:2: output holds a NUL character"):
        load_splits(data)


def test_other_columns_are_ignored(tmp_path: Path) -> None:
    loaded = load_splits(write(tmp_path, train=[{**PLAIN, "id": 4}], validation=[PLAIN]))
    assert loaded["train"].column_names == ["instruction", "input", "output"]


def test_the_limit_takes_the_first_validation_rows(tmp_path: Path) -> None:
    data = write(tmp_path, train=[PLAIN] * 3, validation=[PLAIN] * 4, test=[PLAIN] * 3)
    loaded = load_splits(data, limit_validation=2)
    assert [row["instruction"][:12] for row in loaded["validation"]] == [
        "validation 0",
        "validation 1",
    ]
    assert (len(loaded["train"]), len(loaded["test"])) == (3, 3)
    assert len(load_splits(data, limit_validation=9)["validation"]) == 4
    with pytest.raises(ValueError, match="limit_validation=0 must be at least 1"):
        load_splits(data, limit_validation=0)
