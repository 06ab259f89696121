import json
import math

import pytest

from studies.files import write_json_atomic, write_text_atomic


def test_a_text_is_written_with_the_folders_above_it(tmp_path):
    path = tmp_path / "größe" / "deep" / "x.txt"
    write_text_atomic(path, "línea\n")
    assert path.read_bytes() == "línea\n".encode()


def test_an_older_file_is_replaced(tmp_path):
    path = tmp_path / "x.txt"
    write_text_atomic(path, "old")
    write_text_atomic(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_older_file_and_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    write_text_atomic(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device: .*x.txt"):
        write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_indented_and_strict(tmp_path):
    path = tmp_path / "x.json"
    write_json_atomic(path, {"größe": [1, None]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"größe": [1, None]}
    assert path.read_text(encoding="utf-8").endswith("}\n")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"x": math.nan})
    assert json.loads(path.read_text(encoding="utf-8")) == {"größe": [1, None]}
