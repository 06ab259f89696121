"""Write files so that a reader or a crash never meets half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4


def write_text_atomic(path: Path, text: str) -> None:
    """Write a UTF-8 text beside its place, then move it there; an older file stays until then.

    Raises:
        OSError: The folder cannot be made or written to, or the disk is full; the older file is
            as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{uuid4().hex}.tmp")
    try:
        with draft.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk names none, others the draft
        error.filename2 = None
        raise
    finally:
        draft.unlink(missing_ok=True)


def write_json_atomic(path: Path, document: dict[str, Any]) -> None:
    """Write indented JSON that any parser reads; see `write_text_atomic`.

    Raises:
        ValueError: A number is not finite, which JSON cannot say.
        OSError: The file cannot be written.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2)
    write_text_atomic(path, text + "\n")
