"""Imports go one way: the contracts are in pyproject.toml, import-linter checks them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_imports_go_one_way():
    result = _lint(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("mola/layer.py", "import studies.store"),
        ("studies/store.py", "from search.workers import ray_pool"),
        ("mola/layer.py", "import optuna"),
        ("mola/layer.py", "import ray"),
        ("studies/store.py", "import torch"),
        ("studies/store.py", "from mola import layer"),  # which imports torch
        ("mola/settings.py", "import transformers"),
        ("search/driver.py", "import ray"),
    ],
)
def test_an_import_the_other_way_is_found(tmp_path, module, line):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    sources = {
        "mola/allocation.py": "",
        "mola/events.py": "",
        "mola/layer.py": "import torch\n",
        "mola/settings.py": "",
        "studies/store.py": "import optuna\nimport mola.allocation\n",
        "search/driver.py": "import studies.store\n",
        "search/tune.py": "import ray\n",
        "search/workers/ray_runtime.py": "import ray\n",
        **{f"search/{part}/a.py": "" for part in ("console", "full", "report", "sampler")},
    }
    sources[module] += line + "\n"
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in path.relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder / "__init__.py").touch()
        path.write_text(source)
    result = _lint(tmp_path)
    assert result.returncode == 1, result.stdout
    assert "BROKEN" in result.stdout


@pytest.mark.parametrize(
    "module", ["mola", "studies.export", "studies.store", "search.run", "search.export"]
)
def test_light_modules_load_neither_torch_nor_ray(module):
    script = (
        f"import sys, {module}\n"
        "print([m for m in ('ray', 'torch', 'transformers', 'pandas') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def _lint(folder):
    script = "from importlinter.cli import lint_imports_command as lint; lint()"
    return subprocess.run(
        [sys.executable, "-c", script, "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=False,
        capture_output=True,
        text=True,
    )
