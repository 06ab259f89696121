"""The command line of the search; workers pretend, but for one search from end to end."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner, Result
from optuna_dashboard import get_note
from pretend_pool import PretendPool, no_waiting_for_the_disk

import search.job
import search.pruner
import search.report.dashboard
import search.report.write
import search.run
import search.sampler
from mola.events import Event
from search.workers.pool import Failed, Job
from studies.store import records

Run = Callable[..., Result]
__all__ = ["no_waiting_for_the_disk"]
pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[PretendPool]:
    """Pools that the command is given, one after the other; a fresh one when they run out."""
    waiting: list[PretendPool] = []
    monkeypatch.setattr(
        search.job, "_open_pool", lambda *_: waiting.pop(0) if waiting else PretendPool()
    )
    return waiting


@pytest.fixture
def reports() -> bool:
    """Whether report and dashboard are written, which takes seconds and has tests of its own."""
    return False


@pytest.fixture
def run(
    tiny_model_dir: Path,
    choices_dir: Path,
    tmp_path: Path,
    pools: list[PretendPool],
    monkeypatch: pytest.MonkeyPatch,
    reports: bool,
) -> Run:
    """Run the command in an empty folder, on the tiny model of 4 layers unless told otherwise."""
    monkeypatch.chdir(tmp_path)
    if not reports:
        monkeypatch.setattr(search.report.write, "write_report", lambda *_: None)
        monkeypatch.setattr(search.report.dashboard, "refresh", lambda *_: None)
    settings = {
        "--model": tiny_model_dir,
        "--data": choices_dir,
        "--budget": 12,
        "--trials": 6,
        "--steps": 4,
        "--study": "mine",
        "--confirm-seeds": 2,
    }

    def invoke(*flags: str, **changes: Any) -> Result:
        changed = {**settings, **{f"--{k.replace('_', '-')}": v for k, v in changes.items()}}
        words = [str(w) for pair in changed.items() if pair[1] is not None for w in pair]
        return CliRunner().invoke(search.run.main, [*words, *flags])

    return invoke


def study_records(folder: Path) -> list[Any]:
    return records(optuna.load_study(study_name="mine", storage=f"sqlite:///{folder}/study.db"))


def error_line(result: Result) -> str:
    """The one line that a mistake gets."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [part for part in result.stderr.splitlines() if not part.startswith("Model: ")]
    assert line.startswith("Error: ")
    return line


def test_help_needs_no_heavy_library() -> None:
    heavy = "torch ray transformers datasets optuna pandas rich peft"
    code = f"import sys, search.run; print(*(set('{heavy}'.split()) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "", result.stderr
    help_text = CliRunner().invoke(search.run.main, ["--help"])
    assert help_text.exit_code == 0
    assert "--gpus-per-worker" in help_text.stdout


def test_the_choices_are_those_that_there_are() -> None:
    assert search.run.SAMPLERS == search.sampler.SAMPLERS
    assert search.run.PRUNERS == search.pruner.PRUNERS


@pytest.mark.parametrize("reports", [True])
def test_a_search_ends_with_winner_comparison_files_and_commands(run: Run) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    for text in (
        "Winner: trial",
        "layer 0  █",
        "uniform",
        "2468",
        "optuna-dashboard sqlite:///runs/mine/study.db",
        "python -m search.export --study mine --out",
        "python -m search.compare --study mine --data",
        "python -m search.retrain --allocation runs/mine/allocation.json",
    ):
        assert text in result.stdout
    assert result.stderr.count("trial ") >= 6
    document = json.loads(Path("runs/mine/allocation.json").read_text())
    report = Path("runs/mine/report.html").read_text(encoding="utf-8")
    assert "--budget 12 --trials 6 --steps 4" in report  # the command that ran the trials
    study = optuna.load_study(study_name="mine", storage="sqlite:///runs/mine/study.db")
    assert "over 3 seeds" in get_note(study)
    assert "dashboard:plot_data:best-so-far:0" in study._storage.get_study_system_attrs(
        study._study_id
    )
    assert "What an expert is worth" in Path("runs/mine/report.md").read_text(encoding="utf-8")
    assert sum(document["experts_per_layer"]) == 12
    assert (
        Path("runs/mine/trials.csv").read_text().count("\n")
        == len(study_records(Path("runs/mine"))) + 1
    )


def test_quiet_leaves_the_results_alone(run: Run) -> None:
    result = run("--quiet")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.startswith("Winner: ")


def test_the_same_command_on_a_finished_study_says_so(run: Run) -> None:
    first = run()
    again = run()
    assert again.exit_code == 0
    assert "The study mine is finished: 6 allocations are measured" in again.stderr
    assert again.stdout == first.stdout


def test_the_written_settings_repeat_the_search(run: Run) -> None:
    run("--micro-batch", "2")
    again = CliRunner().invoke(search.run.main, ["--config", "runs/mine/config.toml"])
    assert again.exit_code == 0, again.output
    assert "is finished" in again.stderr
    other = CliRunner().invoke(
        search.run.main, ["--config", "runs/mine/config.toml", "--study", "mine", "--trials", "7"]
    )
    assert other.exit_code == 0, other.output
    own = [r for r in study_records(Path("runs/mine")) if r.label != "replicate"]
    assert len(own) == 7


def test_the_default_name_is_readable_and_finds_the_study_again(run: Run) -> None:
    run(study=None)
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-12")
    assert "is finished" in run(study=None).stderr


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"budget": 3}, "total=3 is out of reach for 4 layers"),
        ({"budget": 40, "max_experts": 6}, "total=40 is out of reach for 4 layers"),
        ({"budget": "many"}, "--budget"),
        ({"budget": None}, "Missing option '--budget'"),
        ({"budget": -1}, "--budget"),
        ({"model": "no/such/folder"}, "model 'no/such/folder': no such folder here"),
        ({"model": "./no-such-folder"}, "model './no-such-folder': no such folder"),
        ({"data": "no/such/data"}, "no/such/data"),
        ({"data": None}, "--model needs --data"),
        ({"steps": 0}, "--steps"),
        ({"rungs": "3,2"}, "--rungs 3,2: expected ascending steps from 1 to 3"),
        ({"rungs": "soon"}, "'soon' is not a list of whole numbers"),
        ({"micro_batch": 99}, "micro_batch=99"),
        ({"max_length": 9999}, "--max-length 9999: the model's context is 512 tokens"),
        ({"learning_rate": "nan"}, "--learning-rate"),
        ({"confirm_seeds": 1}, "--confirm-seeds 1 gives no interval"),
        ({"trial_timeout": 0}, "--trial-timeout"),
        ({"trial_timeout": "nan"}, "--trial-timeout': nan is not a finite number"),
        ({"sampler": "crystal-ball"}, "crystal-ball"),
        ({"study": "../elsewhere"}, "'../elsewhere' cannot name a folder"),
        ({"storage": "carrier-pigeon://x"}, "carrier-pigeon"),
        ({"storage": "nonsense"}, "is not a database URL"),
        ({"address": "ray://head:10001"}, "--address ray://head:10001: a search does not run thr"),
        ({"address": "127.0.0.1:1"}, "--address 127.0.0.1:1: no Ray cluster answers there"),
        ({"config": "nothing.toml"}, "nothing.toml"),
        ({"stepz": 3}, "No such option"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    run: Run, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    assert expected in error_line(run(**changes))
    assert list(tmp_path.iterdir()) == []


def test_an_empty_or_broken_data_set_is_one_line(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    assert "rows" in error_line(run(data="rows"))
    good = '{"instruction": "a", "input": "", "output": "b"}\n'
    (folder / "validation.jsonl").write_text(good)
    (folder / "train.jsonl").write_text(good + '{"instruction": "a"}\n')
    assert "train.jsonl:2" in error_line(run(data="rows"))


def test_a_root_that_cannot_be_written_to_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in error_line(run(root="file/runs"))


def test_another_search_under_the_same_name_is_refused_with_the_differences(run: Run) -> None:
    run()
    line = error_line(run(budget=10, learning_rate=0.5))
    assert "budget (--budget): 10 here, 12 in the study" in line
    assert "learning rate (--learning-rate): 0.5 here, 0.001 in the study" in line


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    result = run("--dry-run")
    assert result.exit_code == 0, result.output
    assert "12 experts over 4 layers, 1 to 6 in each: " in result.stdout
    assert "6 in the search, at most" in result.stdout
    assert "5555: 3x4" in result.stdout
    assert "Proposals of the sampler" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_flags_win_over_the_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "search.yaml").write_text("max-length: 300\nlearning_rate: 1e-2\nrungs: [1, 2]\n")
    result = run("--config", "search.yaml", "--learning-rate", "0.02")
    assert result.exit_code == 0, result.output
    written = Path("runs/mine/config.toml").read_text()
    assert "max_length = 300" in written
    assert "learning_rate = 0.02" in written
    assert "1,\n    2,\n" in written


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step = 3", "unknown setting 'step'; did you mean 'steps'?"),
        ("top-k = 2\ntop_k = 3", "'top_k' is given twice"),
        ("steps = 3.5", "steps must be a whole number, got 3.5"),
        ("steps = true", "steps must be a whole number, got True"),
        ("quiet = 1", "quiet must be true or false, got 1"),
        ("model = 7", "model must be text, got 7"),
        ("rungs = [1.5]", "[1.5] is not a list of whole numbers"),
        ("steps = maybe", "line 1"),
        ("dry_run = true", "unknown setting 'dry_run'"),
        ("[search]\nsteps = 3", "unknown setting 'search'"),
    ],
)
def test_a_wrong_file_of_settings_is_one_line(
    run: Run, tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "search.toml").write_text(text)
    assert expected in error_line(run("--config", "search.toml"))


class Interrupting(PretendPool):
    """The person presses Ctrl-C, or the machine sends SIGTERM, in the middle of a trial."""

    def __init__(self, number: int, times: int = 1) -> None:
        super().__init__()
        self.number = number
        self.times = times
        self.polls = 0

    def poll(self, timeout_seconds: float) -> list[tuple[int, Event | Failed]]:
        self.polls += 1
        if self.polls == 9:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
        return super().poll(timeout_seconds)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(
    run: Run, pools: list[PretendPool], number: int, status: int
) -> None:
    pools.append(Interrupting(number))
    stopped = run()
    assert stopped.exit_code == status
    assert "To go on: python -m search.run --config runs/mine/config.toml" in stopped.stderr
    states = Counter(r.state for r in study_records(Path("runs/mine")))
    assert states["RUNNING"] == 0
    assert states["WAITING"] > 0
    assert run().exit_code == 0
    own = [r for r in study_records(Path("runs/mine")) if r.label != "replicate"]
    assert sum(r.state == "COMPLETE" for r in own) == 6


def test_ctrl_c_twice_leaves_at_once_and_the_same_command_still_goes_on(
    run: Run, pools: list[PretendPool]
) -> None:
    pools.append(Interrupting(signal.SIGINT, times=2))
    assert run().exit_code == 130
    assert run().exit_code == 0


def test_failures_in_a_row_end_with_status_1_and_a_way_on(
    run: Run, pools: list[PretendPool]
) -> None:
    def broken(job: Job) -> list[Event | Failed]:
        return [Failed("CUDA is on strike")]

    pools.append(PretendPool(script=broken))
    result = run(max_failures=2)
    assert result.exit_code == 1
    assert "Error: 2 trials failed in a row, the last one: CUDA is on strike" in result.stderr
    assert "To go on: " in result.stderr
    assert "Traceback" not in result.output
    assert run().exit_code == 0


def test_a_password_in_the_storage_url_is_never_written_or_shown(run: Run, tmp_path: Path) -> None:
    url = "postgresql://me:hunter2@127.0.0.1:9/none"
    line = error_line(run(storage=url))
    assert "hunter2" not in line
    assert "hunter2" not in "".join(
        p.read_text(errors="replace") for p in tmp_path.rglob("*") if p.is_file()
    )


@pytest.mark.timeout(300)  # starts Ray and two processes that load torch
def test_a_search_from_end_to_end_survives_a_killed_driver(
    tiny_model_dir: Path, choices_dir: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "search.run", "--model", str(tiny_model_dir)]
    command += ["--data", str(choices_dir), "--budget", "8", "--trials", "6", "--steps", "3"]
    command += ["--study", "mine", "--confirm-seeds", "0", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(search.run.__file__).parent.parent)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as first:
        assert first.stderr is not None
        next(line for line in first.stderr if line.startswith("trial 1 "))
        first.kill()
    done = [r for r in study_records(tmp_path / "runs/mine") if r.state == "COMPLETE"]
    assert done
    second = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert second.stdout.startswith("Winner: ")
    assert all(
        line.startswith(("trial", "search", "confirmation", "left unfinished"))
        for line in second.stderr.splitlines()
    )
    after = study_records(tmp_path / "runs/mine")
    assert [r for r in after if r.number in {before.number for before in done}] == done
    complete = Counter((r.allocation, r.seed) for r in after if r.state == "COMPLETE")
    assert set(complete.values()) == {1}
    assert len([r for r in after if r.label != "replicate" and r.state != "FAIL"]) == 6
    with sqlite3.connect(tmp_path / "runs/mine/study.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
