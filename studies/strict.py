"""Turn parsed JSON into annotated types, strictly: nothing missing, nothing unknown, no guesses."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_SHORT = reprlib.Repr()
_SHORT.maxstring = 60
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
    if hint is float:
        value = _as_float(value)
    if type(value) is not hint:  # not isinstance: a bool is no int here
        raise ValueError(f"{where} must be {_describe(hint)}, got {shown(value)}")
    if hint is float and not math.isfinite(value):  # Python reads NaN, which JSON has not
        raise ValueError(f"{where} must be a finite number, got {value}")
    return value


def shown(value: Any) -> str:
    """Write a value on one line, shortened, whatever its depth, length or digits."""
    try:
        return _SHORT.repr(value)[:80]
    except ValueError:  # Python writes no integer of thousands of digits
        return "a number of thousands of digits"


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
    raise ValueError(f"{where} must be {_describe(hint)}, got {shown(value)}")


def _as_float(value: Any) -> Any:
    """Read JSON's whole numbers as floats, those beyond all floats as infinite."""
    if type(value) is not int:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf


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
