"""Read and write a command's settings as a TOML or YAML file."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from search.bounds import BudgetList, Fixed, PerLayer
from search.console.cli import CommaList, UserError, one_line, user_errors
from studies.strict import shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FLAGS_ONLY = ("config", "dry_run", "help")


def use_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Take the settings of a file as the command's defaults: the callback of `--config`."""
    if path is not None:
        with user_errors():
            ctx.default_map = check(read(path), ctx.command, path)
    return path


def read(path: Path) -> dict[str, Any]:
    """Read a file of settings; its ending tells TOML (.toml) from YAML (.yaml, .yml).

    Raises:
        UserError: the file cannot be read or does not hold settings.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".toml":
            settings = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            settings = _parse_yaml(text)
        else:
            raise UserError(f"{path}: expected a file that ends in .toml, .yaml or .yml")
    except RecursionError as error:
        raise UserError(f"{path}: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {one_line(error)}") from error
    return settings


def check(settings: Mapping[str, Any], command: click.Command, path: Path) -> dict[str, Any]:
    """Check names and types of settings against a command's options.

    Returns:
        The settings under the options' parameter names: `max-length` becomes `max_length`.

    Raises:
        UserError: a name is unknown, given twice, or its value has the wrong type.
    """
    options = {p.name: p for p in command.params if p.name and p.name not in _FLAGS_ONLY}
    checked: dict[str, Any] = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{path}: unknown setting {shown(key)}{hint}")
        if name in checked:
            raise UserError(f"{path}: the setting {name!r} is given twice")
        checked[name] = _typed(options[name], value, path)
    return checked


def write(path: Path, settings: Mapping[str, Any], heading: str) -> None:
    """Write settings as TOML, whole or not at all; those that are None are left out.

    Args:
        path: the file; its folder exists.
        settings: by parameter name; paths and tuples are written as text and lists.
        heading: a comment for the first line.
    """
    import tomli_w

    from studies.files import write_text_atomic

    plain = {name: _plain(value) for name, value in settings.items() if value is not None}
    write_text_atomic(path, f"# {heading}\n{tomli_w.dumps(plain)}")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _parse_yaml(text: str) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses what would be lost, or grow without end, on the way to settings."""

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases (*name) are not supported")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise yaml.YAMLError(f"{shown(name)} is given twice")
            return super().construct_mapping(node, deep)

    try:
        settings = yaml.load(text, Loader)  # noqa: S506 - a safe loader, made stricter
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ValueError(f"expected 'name: value' lines, got a {type(settings).__name__}")
    return settings


def _typed(option: click.Parameter, value: Any, path: Path) -> Any:
    """Refuse what the command line's parser would bend: 3.7 steps, true rows, a number as name."""
    kind = option.type
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    whole = number and isinstance(value, int)
    if isinstance(option, click.Option) and option.is_flag:
        wanted, right = "true or false", isinstance(value, bool)
    elif isinstance(kind, (CommaList, Fixed)) or option.multiple:
        wanted, right = "a list", isinstance(value, (list, str))
        value = [value] if option.multiple and isinstance(value, str) else value
    elif isinstance(kind, (BudgetList, PerLayer)):
        wanted, right = "a whole number or a list", isinstance(value, (list, str)) or whole
    elif isinstance(kind, click.types.IntParamType):
        wanted, right = "a whole number", whole
    elif isinstance(kind, click.types.FloatParamType):
        # YAML 1.1 reads 1e-3 as text; the option's own parser settles whether it is a number.
        wanted, right = "a number", number or isinstance(value, str)
    else:
        wanted, right = "text", isinstance(value, str)
    if not right:
        raise UserError(f"{path}: {option.name} must be {wanted}, got {shown(value)}")
    return value
