"""Keep the libraries' chatter out of the terminal."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

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
