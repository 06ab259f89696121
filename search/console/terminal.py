"""Keep the libraries' chatter out of the terminal, and a terminal's end out of the search."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click


def calm_libraries() -> None:
    """Turn off progress bars and remarks of the libraries; to be called before their import."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show what our packages warn of as one line each, and no other warnings."""
    before = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, UserWarning):
            click.echo(f"Warning: {' '.join(str(message).split())}", err=True)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


class _Lasting:
    """A text stream whose reader may leave: what is written after that is dropped.

    A search must not end because a terminal was closed, or a pipe's reader has seen enough.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Let progress and messages on stderr fail silently; give what is closed a place to go.

    A file that is opened while stdout or stderr is closed would take its number, and get what
    libraries print.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stderr
    if before is not None:
        sys.stderr = _Lasting(before)
    try:
        yield
    finally:
        sys.stderr = before


def drop_stdout() -> None:
    """Drop what waits to be printed, so that the interpreter does not fail on it at its end."""
    with suppress(io.UnsupportedOperation, ValueError, AttributeError):
        number = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
