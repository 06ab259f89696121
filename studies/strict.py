"""Turn parsed JSON into annotated types, strictly: nothing missing, nothing unknown, no guesses."""

from __future__ import annotations

import dataclasses
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_NAMES = {NoneType: "null", bool: "true or false", int: "an integer", float: "a number"}


def decode(value: Any, hint: Any, where: str) -> Any:
    """Make a value of a type: a dataclass, `tuple[X, ...]`, `dict[str, X]`, a union or a scalar.

    Args:
        value: What `json.loads` gave.
        hint: The type to make of it.
        where: Names the value in messages.

    Raises:
        ValueError: The value does not fit the type; the message names the place in it.
    """
    if get_origin(hint) in (Union, UnionType):
        return _decode_union(value, hint, where)
    if get_origin(hint) is tuple and isinstance(value, list):
        item = get_args(hint)[0]
        return tuple(decode(v, item, f"{where}[{i}]") for i, v in enumerate(value))
    if get_origin(hint) is dict and isinstance(value, dict):
        return {k: decode(v, get_args(hint)[1], f"{where}.{k:.40}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _decode_dataclass(value, hint, where)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # not isinstance: a bool is no int here
        raise ValueError(f"{where} must be {_describe(hint)}, got {value!r:.80}")
    return value


def check_keys(value: dict[str, Any], names: list[str], where: str) -> None:
    """Refuse an object that lacks a key or has one that is unknown.

    Raises:
        ValueError: Names the keys.
    """
    if missing := [name for name in names if name not in value]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if unknown := [f"{name:.40}" for name in value if name not in names]:
        raise ValueError(f"{where} has unknown keys: {', '.join(unknown)}")


def _decode_union(value: Any, hint: Any, where: str) -> Any:
    scalar = type(value) is not list and type(value) is not dict
    for member in get_args(hint):
        try:
            return decode(value, member, where)
        except ValueError:
            if not scalar and get_origin(member) is tuple:
                raise  # its message names the item
    raise ValueError(f"{where} must be {_describe(hint)}, got {value!r:.80}")


def _decode_dataclass(value: dict[str, Any], hint: Any, where: str) -> Any:
    hints = get_type_hints(hint)
    names = [field.name for field in dataclasses.fields(hint)]
    check_keys(value, names, where)
    return hint(**{name: decode(value[name], hints[name], f"{where}.{name}") for name in names})


def _describe(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_describe, get_args(hint)))
    if get_origin(hint) is tuple:
        return "a list"
    if dataclasses.is_dataclass(hint) or get_origin(hint) is dict:
        return "an object"
    return _NAMES.get(hint, "text")
