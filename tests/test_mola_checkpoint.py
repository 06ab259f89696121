from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn

from mola.checkpoint import Progress, load_checkpoint, save_checkpoint


def build(width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
    model[0].bias.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(parameters, lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        x = torch.full((1, 2), float(step + 1))
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def test_going_on_equals_never_having_stopped(tmp_path: Path, accelerator: Accelerator) -> None:
    whole, optimizer = build()
    train(whole, optimizer, 0, 6)
    first, optimizer = build()
    train(first, optimizer, 0, 4)
    save_checkpoint(tmp_path / "c", first, optimizer, Progress(4, 2.5), accelerator)
    second, optimizer = build()
    progress = load_checkpoint(tmp_path / "c", second, optimizer, accelerator)
    assert progress == Progress(4, 2.5)
    train(second, optimizer, 4, 6)
    for mine, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_without_a_file_it_starts_at_zero(tmp_path: Path, accelerator: Accelerator) -> None:
    model, optimizer = build()
    assert load_checkpoint(tmp_path / "none", model, optimizer, accelerator) == Progress(0, 0.0)


def test_only_the_checkpoint_is_left_behind(tmp_path: Path, accelerator: Accelerator) -> None:
    model, optimizer = build()
    for step in (1, 2):
        save_checkpoint(tmp_path / "c", model, optimizer, Progress(step), accelerator)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert load_checkpoint(tmp_path / "c", model, optimizer, accelerator).step == 2


def test_a_failed_write_leaves_the_older_checkpoint(
    tmp_path: Path, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    save_checkpoint(tmp_path / "c", model, optimizer, Progress(1), accelerator)

    def full_disk(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("mola.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="cannot be written: .*No space"):
        save_checkpoint(tmp_path / "c", model, optimizer, Progress(2), accelerator)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert load_checkpoint(tmp_path / "c", model, optimizer, accelerator).step == 1


@pytest.mark.parametrize("content", [b"", b"garbage" * 9, b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_that_is_no_checkpoint_is_refused(
    tmp_path: Path, accelerator: Accelerator, content: bytes
) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(ValueError, match=r"c: cannot go on from it: .*; delete it to start again"):
        load_checkpoint(tmp_path / "c", *build(), accelerator)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, accelerator: Accelerator) -> None:
    save_checkpoint(tmp_path / "c", *build(), Progress(1), accelerator)
    with pytest.raises(ValueError, match=r"0.weight is \(3, 2\), not \(4, 2\)"):
        load_checkpoint(tmp_path / "c", *build(width=4), accelerator)
