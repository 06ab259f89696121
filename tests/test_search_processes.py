"""A retrain on two processes, as `accelerate launch` and `torchrun` start them, equals one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mola.settings import ModelSource, TrainSettings
from search.retrain import main
from studies.allocation_file import AllocationFile, Origin

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

# `accelerate launch --cpu` starts one process; torchrun starts several, which accelerate joins.
LAUNCH = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node",
    "2",
    "--max-restarts=0",
)


def write_allocation(path: Path, model: Path) -> None:
    """An allocation without dropout, whose draws differ from process to process."""
    origin = Origin(
        name="ours",
        trial=3,
        objective="nats per row",
        objective_mean=1.0,
        objective_standard_error=None,
        seeds=1,
        accuracy=None,
        difference_to_uniform=None,
        model=ModelSource(str(model)),
        model_fingerprint="",
        data="choices",
        data_fingerprint="",
        prompt_template="{instruction}\n",
        max_length=64,
        train=TrainSettings(),
        seed=0,
    )
    file = AllocationFile(
        format_version=1,
        base_model=str(model),
        num_layers=4,
        total_experts=6,
        experts_per_layer=(1, 0, 2, 3),
        top_k=2,
        r=2,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules=("q_proj", "v_proj", "up_proj"),
        router_aux_loss_coef=0.0,  # each micro-batch has one of its own: not the same by design
        study=origin,
        versions={},
        upstream_args=None,
    )
    path.write_text(json.dumps(asdict(file)))


def arguments(folder: Path, data: Path) -> list[str]:
    """Train 4 steps of 8 rows: 4 at a time on each of two processes, or twice 4 on one."""
    return [
        "--allocation", str(folder / "a.json"), "--data", str(data), "--out", str(folder / "out"),
        "--epochs", "1", "--batch-size", "8", "--micro-batch", "4", "--learning-rate", "0.01",
    ]  # fmt: skip


def run_of(folder: Path) -> dict[str, Any]:
    (run,) = json.loads((folder / "out" / "results.json").read_text())["runs"]
    assert isinstance(run, dict)
    return run


@pytest.mark.timeout(240)
def test_two_processes_save_once_and_equal_one(
    tmp_path: Path,
    tiny_model_dir: Path,
    choices_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_allocation(tmp_path / name / "a.json", tiny_model_dir)
    command = [sys.executable, *LAUNCH, "-m", "search.retrain"]
    with subprocess.Popen(
        [*command, *arguments(tmp_path / "two", choices_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as two_processes:
        with pytest.raises(SystemExit) as stopped:
            main(arguments(tmp_path / "one", choices_dir))
        printed, errors = two_processes.communicate(timeout=180)
    assert stopped.value.code == 0
    assert two_processes.returncode == 0, errors
    assert printed.count("Adapter (seed 10)") == 1, printed  # one process reports
    adapters, runs = [], []
    for name in ("one", "two"):
        folder = tmp_path / name / "out"
        adapters.append(load_file(folder / "adapter_model.safetensors"))
        runs.append(run_of(tmp_path / name))
        files = {path.name for path in folder.iterdir()}
        assert files == {
            "README.md", "adapter_config.json", "adapter_model.safetensors", "results.json",
        }  # fmt: skip
    one, two = adapters
    assert one.keys() == two.keys()
    assert any(weight.any() for key, weight in one.items() if "lora_B" in key)
    for key in one:  # the gradients are added up in another order
        torch.testing.assert_close(two[key], one[key], rtol=1e-3, atol=1e-5, msg=key)
    for split in ("validation", "test"):
        assert runs[1][split]["objective"] == pytest.approx(runs[0][split]["objective"], rel=1e-4)
        assert runs[1][split]["rows"] == runs[0][split]["rows"] == 12
