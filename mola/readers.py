"""Find the rows of a data set in files, in a saved folder or on the hub, each with its place.

Nothing is repaired: what cannot be read is an error that says where it is.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import dataset_info
from huggingface_hub.errors import OfflineModeIsEnabled

SPLITS = ("train", "validation", "test")
COLUMNS = ("instruction", "input", "output", "choices")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

Located = Iterable[tuple[str, object]]  # ("train.jsonl:17", the row as it was read)


def locate(data: str) -> dict[str, tuple[str, Located]]:
    """Find each split's rows, and the name under which errors speak of it.

    Args:
        data: A folder or a hub id, as `mola.rows.load_splits` takes them.

    Raises:
        ValueError: If a split is missing or cannot be read. What is wrong inside a text file
            comes when its rows are read.
    """
    folder = Path(data)
    if not folder.exists():
        if not _HUB_ID.fullmatch(data):
            raise ValueError(f"data {data!r}: there is no such folder")
        return _require_splits(data, _from_hub(data))
    if not folder.is_dir():
        raise ValueError(f"data {data!r} is a file; give the folder with train and validation")
    if (folder / "dataset_dict.json").is_file():
        with _readable_errors(data), _no_progress_bars():
            saved = datasets.load_from_disk(str(folder))
        return _require_splits(data, saved)
    if (folder / "state.json").is_file():
        raise ValueError(
            f"data {data!r} holds one split alone; save a DatasetDict with train and validation"
        )
    return _from_files(folder)


def _from_files(folder: Path) -> dict[str, tuple[str, Located]]:
    found: dict[str, tuple[str, Located]] = {}
    for split in SPLITS:
        paths = [p for suffix in _READERS if (p := folder / (split + suffix)).exists()]
        if len(paths) > 1:
            raise ValueError(
                f"{folder}: {' and '.join(p.name for p in paths)} are both there; keep one"
            )
        if paths:
            found[split] = (str(paths[0]), _READERS[paths[0].suffix](paths[0]))
        elif split != "test":
            there = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
            raise ValueError(
                f"{folder}: no {split} file; expected {split}.jsonl, .json, .csv or .parquet, "
                f"the folder holds {there}"
            )
    return found


def _from_hub(name: str) -> Any:
    with _readable_errors(name, "no such folder here, and it cannot be had from the hub"):
        with suppress(OfflineModeIsEnabled):  # a copy in the cache will do
            dataset_info(name, timeout=10)  # fails at once where loading would retry for long
        with _no_progress_bars():
            return datasets.load_dataset(name)


def _require_splits(name: str, loaded: Any) -> dict[str, tuple[str, Located]]:
    for split in ("train", "validation"):
        if split not in loaded:
            raise ValueError(f"{name}: no {split} split; it has {', '.join(loaded) or 'none'}")
    return {
        split: (f"{name}, split {split}", _dataset_rows(f"{name}, split {split}", loaded[split]))
        for split in SPLITS
        if split in loaded
    }


def _dataset_rows(name: str, dataset: datasets.Dataset) -> Iterator[tuple[str, object]]:
    require_columns(name, dataset.column_names)
    known = [column for column in COLUMNS if column in dataset.column_names]
    for number, row in enumerate(dataset.select_columns(known).to_list(), start=1):
        yield f"{name}, row {number}", row


def _read_json_lines(path: Path) -> Iterator[tuple[str, object]]:
    # Not splitlines(): it also splits at characters that JSON allows inside a text.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", _parse_json(path, line, first_line=number)


def _read_json(path: Path) -> Iterator[tuple[str, object]]:
    text = _read_text(path)
    if not text.lstrip().startswith("["):
        yield from _read_json_lines(path)
        return
    _parse_json(path, text)  # from here on the array is known to be well formed
    decoder = json.JSONDecoder()
    line, counted, position = 1, 0, text.index("[") + 1
    while text[start := _skip(text, position)] != "]":
        line += text.count("\n", counted, start)
        row, position = decoder.raw_decode(text, start)
        counted = start
        yield f"{path}:{line}", row


def _read_csv(path: Path) -> Iterator[tuple[str, object]]:
    text = _read_text(path)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    try:
        line = 1
        for cells in _whole_cells(reader, text):
            where, line = f"{path}:{line}", reader.line_num + 1
            if not cells:
                continue
            if header is None:
                header = cells
                require_columns(where, header)
                continue
            if len(cells) != len(header):
                raise ValueError(f"{where}: {len(cells)} cells, the header has {len(header)}")
            row: dict[str, Any] = dict(zip(header, cells, strict=True))
            if "choices" in row:
                row["choices"] = _parse_choices_cell(where, row["choices"])
            yield where, row
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: malformed CSV ({error})") from error


def _whole_cells(reader: Any, text: str) -> Iterator[list[str]]:
    """Yield the records of a CSV file without the module's limit of 128 KiB for a cell."""
    while True:
        limit = csv.field_size_limit(max(len(text), 1))  # one for the whole process
        try:
            cells = next(reader, None)
        finally:
            csv.field_size_limit(limit)
        if cells is None:
            return
        yield cells


def _read_parquet(path: Path) -> Iterator[tuple[str, object]]:
    from pyarrow.parquet import ParquetFile

    with _readable_errors(str(path)):
        table = ParquetFile(path)
        names = table.schema_arrow.names
        rows = table.read(columns=[name for name in COLUMNS if name in names]).to_pylist()
    require_columns(str(path), names)
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, object]]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path}: it is UTF-16, not UTF-8; re-encode it")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 ({error.reason}); re-encode it") from error


def _skip(text: str, position: int) -> int:
    """Go to the next item of a well-formed JSON array, or to its closing bracket."""
    while text[position] in " \t\n\r,":
        position += 1
    return position


def _parse_json(path: Path, text: str, first_line: int = 1) -> object:
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ValueError(f"{path}:{line}: malformed JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise ValueError(f"{path}:{first_line}: unreadable JSON ({error})") from error


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make an object of its keys, of which JSON's reader would keep the last of two alike."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{short(twice)} is there twice")
    return found


def _parse_choices_cell(where: str, cell: str) -> object:
    if not cell.strip():
        return None
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'{where}: choices must be a JSON list such as ["yes", "no"], got {short(cell)}'
        ) from error


def require_columns(where: str, columns: Iterable[object]) -> None:
    """Check the names of the columns.

    Raises:
        ValueError: If a required column is missing, or one is there twice.
    """
    names = list(columns)
    for column in ("instruction", "output"):
        if column not in names:
            there = ", ".join(short(name) for name in names[:8]) or "none"
            raise ValueError(f"{where}: column {column!r} is missing; there are: {there}")
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: a column is there twice: {short(names)}")


def short(value: object) -> str:
    """Quote a value on one line, shortened."""
    text = repr(value[:60] if isinstance(value, (str, bytes)) else value)  # rows may be huge
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def _readable_errors(name: str, hint: str = "cannot be read") -> Iterator[None]:
    """Turn whatever a library raises about a file or the hub into one line."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"data {name!r}: {hint} ({reason})") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
