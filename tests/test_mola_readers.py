from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from mola import readers
from mola.rows import load_splits

ROWS = [
    {"instruction": "Say a.\nNow.", "input": "x", "output": "a", "choices": ["a", "b"]},
    {"instruction": "Sag «b»\u2028!", "input": "", "output": "b", "choices": ["a", "b"]},
]
TRAIN = [{"instruction": "other", "input": "", "output": "a", "choices": ["a", "b"]}]
GOOD = '{"instruction": "i", "output": "o"}\n'


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in ROWS), "utf-8")


def write_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=2), "utf-8")


def write_csv(path: Path) -> None:
    import pandas as pd

    table = pd.DataFrame(ROWS)
    table["choices"] = [json.dumps(row["choices"]) for row in ROWS]
    table.to_csv(path, index=False)


def write_parquet(path: Path) -> None:
    import pandas as pd

    pd.DataFrame(ROWS).to_parquet(path)


@pytest.mark.parametrize(
    ("suffix", "write"),
    [
        (".jsonl", write_jsonl),
        (".json", write_json),
        (".json", write_jsonl),
        (".csv", write_csv),
        (".parquet", write_parquet),
    ],
)
def test_every_format_gives_the_same_rows(
    tmp_path: Path, suffix: str, write: Callable[[Path], None]
) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(TRAIN[0]))
    write(tmp_path / f"validation{suffix}")
    assert load_splits(str(tmp_path))["validation"].to_list() == ROWS


def test_a_saved_dataset_gives_the_same_rows(tmp_path: Path) -> None:
    splits = {"train": TRAIN, "validation": ROWS, "extra": ROWS}
    saved = datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in splits.items()})
    saved.save_to_disk(str(tmp_path / "saved"))
    loaded = load_splits(str(tmp_path / "saved"))
    assert {split: rows.to_list() for split, rows in loaded.items()} == {
        "train": TRAIN,
        "validation": ROWS,
    }


def test_a_hub_id_is_loaded_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": TRAIN, "validation": ROWS, "test": ROWS}
    saved = datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in splits.items()})
    monkeypatch.setattr(readers, "dataset_info", lambda name, timeout: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"our/data": saved}[name])
    assert load_splits("our/data")["test"].to_list() == ROWS


def test_an_unknown_hub_id_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, timeout: float) -> None:
        raise RuntimeError("Name or service not known\nmore")

    monkeypatch.setattr(readers, "dataset_info", unreachable)
    with pytest.raises(ValueError, match=r"'no/such': no such folder here, .* not known\)$"):
        load_splits("no/such")


def file(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", GOOD + "\n" + '{"instruction": \n', "train.jsonl:3: malformed JSON"),
        ("train.jsonl", GOOD + "{'instruction'}\n", "train.jsonl:2: malformed JSON"),
        ("train.jsonl", GOOD + "[" * 100_000, "train.jsonl:2: unreadable JSON"),
        ("train.jsonl", f'{{"a": {"9" * 5000}}}', "train.jsonl:1: unreadable JSON"),
        ("train.jsonl", GOOD + '"text"\n', "train.jsonl:2: expected an object"),
        ("train.jsonl", GOOD.encode() * 2 + b'{"\xe9', "train.jsonl:3: not UTF-8"),
        ("train.jsonl", GOOD.encode("utf-16"), "train.jsonl: it is UTF-16, not UTF-8"),
        ("train.jsonl", GOOD.encode("utf-16-le"), "train.jsonl:1: malformed JSON"),
        (
            "train.jsonl",
            GOOD + '{"output": "a", "output": "b"}\n',
            "2: unreadable JSON ('output' is",
        ),
        ("train.json", '[{"output": "a", "output": "b"}]', "1: unreadable JSON ('output' is there"),
        ("train.jsonl", GOOD + GOOD.replace("i", "\\u0000", 1), "2: column 'instruction' is"),
        ("train.csv", "instruction,output\n\0,b\n", "instruction holds a NUL character"),
        ("train.jsonl", GOOD + f'"{"x" * 10_000_000}"\n', "train.jsonl:2: expected an object"),
        ("train.jsonl", "", "train.jsonl: no rows"),
        ("train.jsonl", "\n \n", "train.jsonl: no rows"),
        ("train.json", "[]", "train.json: no rows"),
        ("train.json", f"[{GOOD},\n{GOOD}\n", "train.json:5: malformed JSON"),
        ("train.json", f"[\n{GOOD},\n\n  4]", "train.json:5: expected an object"),
        ("train.json", f"[{GOOD}] []", "train.json:2: malformed JSON"),
        ("train.csv", "", "train.csv: no rows"),
        ("train.csv", "question,answer\nq,a\n", "train.csv:1: column 'instruction' is missing"),
        ("train.csv", "instruction,output,output\n", "train.csv:1: a column is there twice"),
        (
            "train.csv",
            'instruction,output\n"a\nb",c\nd\n',
            "train.csv:4: 1 cells, the header has 2",
        ),
        ("train.csv", 'instruction,output\na,b\n"c\n', "train.csv:3: malformed CSV"),
        (
            "train.csv",
            "instruction,output,choices\na,b,a;b\n",
            "train.csv:2: choices must be a JSON",
        ),
        ("train.parquet", "no parquet", "train.parquet': cannot be read"),
        ("dataset_dict.json", "{", "cannot be read"),
        ("state.json", "{}", "holds one split alone"),
    ],
)
def test_a_broken_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    file(tmp_path / "validation.jsonl", GOOD)
    file(tmp_path / name, content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_splits(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_cell_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    long = "x" * 200_000  # the module's own limit is 131072
    file(tmp_path / "train.csv", f"instruction,output\n{long},b\n")
    file(tmp_path / "validation.jsonl", GOOD)
    limit = csv.field_size_limit()
    assert load_splits(str(tmp_path))["train"][0]["instruction"] == long
    assert csv.field_size_limit() == limit


def test_a_parquet_row_is_named_by_its_number(tmp_path: Path) -> None:
    import pandas as pd

    file(tmp_path / "validation.jsonl", GOOD)
    pd.DataFrame({"instruction": ["a", "b"], "output": ["c", None]}).to_parquet(
        tmp_path / "train.parquet"
    )
    with pytest.raises(ValueError, match=r"train\.parquet, row 2: output must be text, got None"):
        load_splits(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no train file; .* the folder holds nothing"),
        (["train.jsonl"], "no validation file; .* the folder holds train.jsonl"),
        (["train.jsonl", "valid.jsonl"], "no validation file; .*, valid.jsonl"),
        (["train.jsonl", "train.csv"], "train.jsonl and train.csv are both there"),
    ],
)
def test_missing_or_ambiguous_files_are_refused(
    tmp_path: Path, files: list[str], message: str
) -> None:
    for name in files:
        file(tmp_path / name, GOOD)
    with pytest.raises(ValueError, match=message):
        load_splits(str(tmp_path))


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such folder"):
        load_splits(str(tmp_path / "missing"))
    file(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(ValueError, match="is a file; give the folder"):
        load_splits(str(tmp_path / "rows.jsonl"))


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    file(tmp_path / "train.jsonl", b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    file(tmp_path / "validation.csv", "\ufeffinstruction,output\r\na,b\r\n")
    loaded: dict[str, Any] = load_splits(str(tmp_path))
    assert loaded["train"].to_list() == [{"instruction": "i", "input": "", "output": "o"}]
    assert loaded["validation"].to_list() == [{"instruction": "a", "input": "", "output": "b"}]
