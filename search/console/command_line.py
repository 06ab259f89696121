"""Write a command and its settings as a line that can be pasted."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Any

import click


def module_command(name: str, *arguments: str) -> str:
    """Write `python -m search.NAME ARGUMENTS`, quoted where a shell needs it."""
    return shlex.join(["python", "-m", f"search.{name}", *arguments])


def given_options(
    command: click.Command, settings: Mapping[str, Any], given: Collection[str]
) -> list[str]:
    """Write the settings that were given, by flag or by file, as flags.

    Args:
        command: Knows the flags.
        settings: By parameter name.
        given: Names of those to write.

    Returns:
        Words for a command line; the passwords in a storage URL are masked.
    """
    words: list[str] = []
    for param in command.params:
        value = settings.get(str(param.name))
        if param.name not in given or value is None or value is False:
            continue
        flag = max(param.opts, key=len)
        if value is True:
            words.append(flag)
        elif getattr(param, "multiple", False):
            words += [word for each in value for word in (flag, _word(str(param.name), each))]
        else:
            words += [flag, _word(str(param.name), value)]
    return words


def study_place(root: object, storage: str | None) -> list[str]:
    """Write where a study is as flags; the default place needs none."""
    where = [] if str(root) == "runs" else ["--root", str(root)]
    return where if storage is None else [*where, "--storage", _word("storage", storage)]


def _word(name: str, value: Any) -> str:
    if name == "storage":
        from studies.storage import mask  # imports Optuna, which --help can do without

        return mask(value)
    if isinstance(value, tuple):
        # --fix is made of pairs
        items = ["=".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in value]
        return ",".join(items) or "none"
    return str(value)
