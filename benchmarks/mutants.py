"""Change a source file in one place after the other, and see whether its tests notice.

    python -m benchmarks.mutants mola/allocation.py tests/test_mola_allocation.py

Comparisons, arithmetic, numbers, conditions, `and` and `or`, `return`s and calls as statements are
changed, one a mutant. A mutant is killed if a test fails or takes too long. Those that survive are
printed with what was changed: a line that no test looks at, or a change that makes no difference.
Each mutant is a fork of a process that has the libraries loaded, so that it costs its tests alone.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

LONGEST = 5  # times the unchanged source's tests, beyond which a mutant counts as killed
SURVIVED, KILLED = 0, 1
COMPARE = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Give what may stand in the place of a node."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if type(operator) in COMPARE:
                changed = copy.deepcopy(node)
                changed.ops[place] = COMPARE[type(operator)]()
                yield changed
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
        changed = copy.deepcopy(node)
        changed.op = ARITHMETIC[type(node.op)]()
        yield changed
    elif isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        changed = copy.deepcopy(node)
        changed.value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield changed
    elif isinstance(node, ast.IfExp):
        yield copy.deepcopy(node.body)
        yield copy.deepcopy(node.orelse)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, (ast.Break, ast.Continue, ast.Raise)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()


def mutants(source: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield each mutant: where and what, and the changed module."""
    tree = ast.parse(source)
    quiet = set(_annotations(tree))
    places = [
        (node, field, place)
        for node in ast.walk(tree)
        for field, value in ast.iter_fields(node)
        for place, _ in enumerate(value if isinstance(value, list) else [value])
    ]
    for node, field, place in places:
        value = getattr(node, field)
        old = value[place] if isinstance(value, list) else value
        if not isinstance(old, ast.AST) or old in quiet:
            continue
        for new in changes(old):
            ast.copy_location(new, old)
            _put(node, field, place, new)
            what = f"{getattr(old, 'lineno', 0)}: {_text(old)}  ->  {_text(new)}"
            yield what, ast.fix_missing_locations(copy.deepcopy(tree))
            _put(node, field, place, old)


def _put(node: ast.AST, field: str, place: int, new: ast.AST) -> None:
    value = getattr(node, field)
    if isinstance(value, list):
        value[place] = new
    else:
        setattr(node, field, new)


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:100]


def _annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what is no code at run time: annotations, and what only type checkers read."""
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if (found := getattr(node, field, None)) is not None:
                yield from ast.walk(found)
        if isinstance(node, ast.If) and _text(node.test) == "TYPE_CHECKING":
            yield from ast.walk(node)


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import a module from a changed tree.

    Args:
        name: Of the module.
        tree: Its source.
        path: Of its file.
    """

    def __init__(self, name: str, tree: ast.Module, path: Path) -> None:
        self.name, self.tree, self.path = name, tree, path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module."""
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(self.path))

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed source."""
        module.__file__ = str(self.path)
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)  # noqa: S102


def survives(name: str, tree: ast.Module, path: Path, tests: Sequence[str], seconds: float) -> bool:
    """Run the tests on a mutant, in a fork, for so long at most."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        os._exit(_run(name, tree, path, tests))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == SURVIVED


def _run(name: str, tree: ast.Module, path: Path, tests: Sequence[str]) -> int:
    import pytest

    sys.meta_path.insert(0, Changed(name, tree, path))
    silent = io.StringIO()
    preloaded = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-x", "-q", "-W", preloaded, "-p", "no:cacheprovider", "-o", "addopts="]
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            status = pytest.main([*options, "-o", "timeout=0", *tests])
    except BaseException:  # whatever a mutant does
        return KILLED
    return SURVIVED if status == pytest.ExitCode.OK else KILLED


def main() -> int:
    """Try the mutants of one file, and print those that survive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("source", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--sample", type=int, help="so many of the mutants (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument("--preload", default="hypothesis,numpy", help="modules to load once")
    options = parser.parse_args()
    os.environ["CI"] = "1"  # the same examples for each mutant
    for library in options.preload.split(","):
        importlib.import_module(library)
    name = ".".join(options.source.with_suffix("").parts)
    if name in sys.modules:
        parser.error(f"--preload has imported {name} already")
    source = options.source.read_text(encoding="utf-8")
    began = time.monotonic()
    if not survives(name, ast.parse(source), options.source, options.tests, seconds=600):
        parser.error("the tests fail without any change, or take longer than ten minutes")
    seconds = LONGEST * (time.monotonic() - began)
    found = list(mutants(source))
    if options.sample is not None and options.sample < len(found):
        found = random.Random(options.seed).sample(found, options.sample)  # noqa: S311
    began, alive = time.monotonic(), 0
    for what, tree in found:
        if survives(name, tree, options.source, options.tests, seconds):
            alive += 1
            print(f"{options.source}:{what}", flush=True)
    print(
        f"{options.source}: {len(found)} mutants, {len(found) - alive} killed, {alive} survived, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
