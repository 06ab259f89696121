"""Read the rows of a data set, and refuse with file and line whatever is wrong with them.

A row is `{"instruction", "input" (optional), "output"}`, all text, with an optional list `choices`
of candidate outputs, the gold `output` among them. Other columns are ignored. Nothing is repaired:
what does not fit is an error that says where it is.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, NamedTuple

import datasets

from mola.readers import Located, locate, require_columns, short

# Control characters but for tab, line feed, vertical tab, form feed and carriage return.
_ODD = re.compile("[\x01-\x08\x0e-\x1f\x7f-\x9f\ufffd]")


class Row(NamedTuple):
    """A row that was checked; `choices` is None where there are none."""

    instruction: str
    input: str
    output: str
    choices: list[str] | None


def load_splits(
    data: str | None, *, limit_validation: int | None = None
) -> dict[str, datasets.Dataset]:
    """Read and check a data set.

    Args:
        data: A folder with `train`, `validation` and perhaps `test` files (one each: JSON Lines,
            JSON, CSV with a header, or Parquet), a folder saved by `DatasetDict.save_to_disk`, or
            the id of a data set on the Hugging Face hub. A `.json` file is a list of rows or JSON
            Lines; a CSV cell of `choices` is a JSON list. Text files are UTF-8, and blank lines
            are skipped. None is the built-in task.
        limit_validation: Take the first so many rows of the validation split, in file order; None
            takes all.

    Returns:
        "train", "validation" and, where there is one, "test": columns instruction, input, output
        and, where the rows have them, choices; in memory.

    Raises:
        ValueError: If anything is missing, cannot be read or does not fit. All rows of a split
            have choices, or none. Validation and test agree in it; train may do without.

    Warns:
        UserWarning: If prompts of validation or test are in train too, or texts hold control
            characters or marks of a wrong decoding, with the number of rows.
    """
    if limit_validation is not None and limit_validation < 1:
        raise ValueError(f"limit_validation={limit_validation} must be at least 1")
    splits: dict[str, Any]
    if data is None:
        from mola.demo import load_task

        splits = load_task()
    else:
        rows = {split: _check_split(name, found) for split, (name, found) in locate(data).items()}
        _check_choices_agree(data, rows)
        _warn_of_leaks(data, rows)
        _warn_of_control_characters(data, rows)
        splits = {split: _as_dataset(checked) for split, checked in rows.items()}
    if limit_validation is not None:
        validation = splits["validation"]
        first = validation.select(range(min(limit_validation, len(validation))))
        splits = {**splits, "validation": first}
    return splits


def _check_split(name: str, rows: Located) -> list[Row]:
    checked: list[Row] = []
    for where, raw in rows:
        row = _check_row(where, raw)
        if checked and (row.choices is None) != (checked[0].choices is None):
            here, first = ("no", "some") if row.choices is None else ("some", "no")
            raise ValueError(
                f"{where}: {here} choices here, {first} choices in the first row; "
                "all rows of a split need them, or none"
            )
        checked.append(row)
    if not checked:
        raise ValueError(f"{name}: no rows")
    return checked


def _check_row(where: str, row: object) -> Row:
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: expected an object with instruction and output, got {short(row)}"
        )
    require_columns(where, row)
    instruction = _text(where, "instruction", row["instruction"])
    extra = row.get("input")
    extra = "" if extra is None else _text(where, "input", extra)
    output = _text(where, "output", row["output"])
    if not (instruction + extra).strip():
        raise ValueError(f"{where}: instruction and input are both empty")
    if not output.strip():
        raise ValueError(f"{where}: output is empty")
    choices = row.get("choices")
    if choices is not None:
        choices = _check_choices(where, choices, output)
    return Row(instruction, extra, output, choices)


def _check_choices(where: str, choices: object, output: str) -> list[str]:
    if not isinstance(choices, list):
        raise ValueError(f"{where}: choices must be a list of texts, got {short(choices)}")
    texts = [_text(where, f"choices[{i}]", choice) for i, choice in enumerate(choices)]
    if len(texts) < 2:
        raise ValueError(f"{where}: choices needs two or more candidates, got {short(texts)}")
    for i, text in enumerate(texts):
        if not text.strip():
            raise ValueError(f"{where}: choices[{i}] is empty")
        if text in texts[:i]:
            raise ValueError(f"{where}: choices has {short(text)} twice")
    if output not in texts:
        raise ValueError(
            f"{where}: the output {short(output)} is not among the choices {short(texts)}"
        )
    return texts


def _text(where: str, column: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {column} must be text, got {short(value)}")
    if "\0" in value:
        raise ValueError(f"{where}: {column} holds a NUL character; is the file damaged?")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: {column} holds half a character (a lone surrogate)") from None
    return value


def _check_choices_agree(data: str, rows: dict[str, list[Row]]) -> None:
    having = {split: checked[0].choices is not None for split, checked in rows.items()}
    if "test" in having and having["test"] != having["validation"]:
        raise ValueError(f"{data}: of validation and test, only one has choices; both need them")
    if having["train"] and not having["validation"]:
        raise ValueError(f"{data}: train has choices, validation has none; it needs them too")


def _warn_of_leaks(data: str, rows: dict[str, list[Row]]) -> None:
    seen = {(row.instruction, row.input) for row in rows["train"]}
    for split in ("validation", "test"):
        checked = rows.get(split, [])
        leaked = sum((row.instruction, row.input) in seen for row in checked)
        if leaked:
            warnings.warn(
                f"{data}: {leaked} of {len(checked)} {split} rows have a prompt that is in train "
                f"too; {split} results will look better than they are",
                stacklevel=3,
            )


def _warn_of_control_characters(data: str, rows: dict[str, list[Row]]) -> None:
    for split, checked in rows.items():
        odd = sum(any(map(_ODD.search, _texts(row))) for row in checked)
        if odd:
            warnings.warn(
                f"{data}: {odd} of {len(checked)} {split} rows hold control characters, or U+FFFD "
                "from a wrong decoding; they are used as they are",
                stacklevel=3,
            )


def _texts(row: Row) -> list[str]:
    return [row.instruction, row.input, row.output, *(row.choices or ())]


def _as_dataset(rows: list[Row]) -> datasets.Dataset:
    columns: dict[str, Any] = {
        "instruction": [row.instruction for row in rows],
        "input": [row.input for row in rows],
        "output": [row.output for row in rows],
    }
    if rows[0].choices is not None:
        columns["choices"] = [row.choices for row in rows]
    return datasets.Dataset.from_dict(columns)
