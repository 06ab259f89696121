"""Every command that README and CONTRIBUTING name exists and has the options that are shown."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parent.parent
TEXTS = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")]
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
PROGRAMS = ("python", "pip", "pytest", "ruff", "mypy", "lint-imports", "vulture", "coverage")
PROGRAMS += ("pip-audit", "optuna-dashboard", "bash")
SEARCH = {"run", "export", "retrain", "compare", "status", "report"}


def commands() -> Iterator[str]:
    """Yield the commands of code blocks and of code within lines."""
    for text in TEXTS:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if not language:
                lines = block.replace("\\\n", " ").splitlines()
                yield from (part.strip() for line in lines for part in line.split("&&"))
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))


COMMANDS = sorted({c for c in commands() if c.split(" ")[0] in PROGRAMS and len(c.split()) > 1})
OF_PYTHON = [shlex.split(c)[1:] for c in COMMANDS if c.startswith("python")]


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) > 20
    assert any("--gpus" not in c and "search.run" in c for c in COMMANDS)


@pytest.mark.parametrize("words", OF_PYTHON, ids=" ".join)
def test_a_command_has_the_options_that_are_shown(words: list[str]) -> None:
    if words[:2] == ["-m", "venv"]:
        return
    module = words[1] if words[0] == "-m" else words[0].removesuffix(".py").replace("/", ".")
    rest = words[2:] if words[0] == "-m" else words[1:]
    package, name = module.split(".")
    if package == "search":
        assert name in SEARCH
        found = importlib.import_module("search.report.__main__" if name == "report" else module)
        command: click.Command = found.main
        command.make_parser(click.Context(command)).parse_args(list(rest))
        return
    flags = {word for word in rest if word.startswith("--")}
    assert flags <= options_of(ROOT / package / f"{name}.py")


def options_of(path: Path) -> set[str]:
    """List the options of a script, by argparse or click, which both take them as texts."""
    calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
    return {
        argument.value
        for call in calls
        if ast.unparse(call.func).endswith(("add_argument", "option"))
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


def test_what_contributing_checks_is_what_ci_checks() -> None:
    table = re.findall(r"^\| [^|]+ \| `([^`]+)`", TEXTS[1].split("## Checks")[1], re.MULTILINE)
    assert len(table) >= 8
    missing = [c for c in table if c not in CI and not c.startswith(("pytest tests/", "bash"))]
    assert missing == []


def test_the_readmes_test_command_is_the_one_that_ci_runs() -> None:
    (line,) = re.findall(r"^pip install .*&& pytest$", TEXTS[0], re.MULTILINE)
    assert line.replace("pip install", "pip install --quiet") in CI
