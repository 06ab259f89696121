"""Files for which there is no room: a line that says so, and what was there before is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pretend_pool import no_waiting_for_the_disk
from pretend_study import searched_study
from small_disk import mounted
from test_search_run import Run, pools, reports, run
from transformers import PreTrainedModel

import search.export
import search.report.__main__ as search_report
from mola.allocation import Allocation
from mola.base import load_model
from mola.config import MolaConfig
from mola.model import get_mola_model, load_mola_model
from mola.settings import ModelSource
from studies.store import write_trials_csv

__all__ = ["no_waiting_for_the_disk", "pools", "reports", "run"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "4m") as folder:
        yield folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "filler"
    }


def check_no_room(folder: Path, write: Callable[[], Any]) -> None:
    """Check that what cannot be written leaves what there was, and can be once there is room."""
    before = contents(folder)
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(65536) if file.tell() < 2**20 else bytes(512))
    write()
    assert contents(folder) == before
    filler.unlink()


def refused(command: click.Command, *arguments: object) -> None:
    """Run a command that has no room for its file."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert "No space left on device" in line


def test_export_report_and_table_leave_the_older_files(small_disk: Path, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    study = searched_study(storage=storage)
    export = (search.export.main, "--study", "mine", "--storage", storage, "--out")
    report = (search_report.main, "--study", "mine", "--storage", storage, "--root", small_disk)
    out = small_disk / "a.json"

    def all_refused() -> None:
        refused(*export, out)
        refused(*report)
        with pytest.raises(OSError, match="No space left"):
            write_trials_csv(study, small_disk / "trials.csv")

    for command, *arguments in ((*export, out), report):
        done = CliRunner().invoke(command, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output
    write_trials_csv(study, small_disk / "trials.csv")
    check_no_room(small_disk, all_refused)
    assert CliRunner().invoke(export[0], [*export[1:], str(out)]).exit_code == 0


def test_an_adapter_leaves_the_older_one(small_disk: Path, tiny_model: PreTrainedModel) -> None:
    folder = small_disk / "adapter"
    old = get_mola_model(tiny_model, MolaConfig(experts=(1, 2, 2, 3), r=2))
    old.save_pretrained(folder)

    def refuse() -> None:
        with pytest.raises(OSError, match="No space left"):
            old.save_pretrained(folder)

    check_no_room(folder, refuse)
    base = load_model(ModelSource(old.active_peft_config.base_model_name_or_path))
    again = load_mola_model(base, folder)
    assert again.active_peft_config.allocation == Allocation([1, 2, 2, 3])


def test_a_file_that_cannot_be_written_at_the_end_is_one_line_and_written_the_next_time(
    run: Run, no_waiting_for_the_disk: None
) -> None:
    Path("runs/mine/trials.csv").mkdir(parents=True)
    result = run(trials=5, confirm_seeds=0)
    assert result.exit_code == 1
    assert result.stdout == ""
    error, way_on = result.stderr.splitlines()[-2:]
    assert error.startswith("Error: ")
    assert "Is a directory" in error
    assert way_on.startswith("To go on: python -m search.run")
    Path("runs/mine/trials.csv").rmdir()
    assert run(trials=5, confirm_seeds=0).exit_code == 0
    assert Path("runs/mine/allocation.json").exists()
