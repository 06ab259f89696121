"""How a search stands, as another shell is told it."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import optuna
import pytest
from click.testing import CliRunner, Result
from pretend_pool import no_waiting_for_the_disk
from pretend_study import SEARCHED, SPEC, empty_study, run_one, searched_study

from search.priors.named import named
from search.report.findings import read_findings
from search.report.measures import seconds_left
from search.status import describe, main
from studies.provenance import note_run

__all__ = ["no_waiting_for_the_disk"]
pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

UNIFORM, TRIANGLE = named("5555", SPEC.budget), named("8642", SPEC.budget)
PROPOSED = SEARCHED[0]


def status(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def url(root: Path, name: str) -> str:
    (root / name).mkdir(parents=True)
    return f"sqlite:///{root / name / 'study.db'}"


def running_study(name: str = "mine", storage: str | None = None) -> optuna.Study:
    """Two trials are done and one runs, of six that are wanted."""
    study = empty_study(name, storage)
    note_run(study, "the command", train_rows=1, validation_rows=1, goal=6, replicates=4)
    run_one(study, UNIFORM, label="named 5555")
    run_one(study, TRIANGLE, label="named 8642")
    run_one(study, named("2468", SPEC.budget), label="named 2468", end="leave")
    return study


def test_a_running_search_says_what_is_done_and_what_is_best(tmp_path: Path) -> None:
    running_study(storage=url(tmp_path, "mine"))
    result = status("--study", "mine", "--root", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("mine: running\n")
    assert "2 done, 1 running, 0 pruned, 0 failed, 0 waiting; 2 of 6 allocations" in result.stdout
    assert "nats per row, 8642, uniform 0.8659 (-0.1260)" in result.stdout
    assert "running: trial 2, seed 0, for" in result.stdout
    assert "after step 5" in result.stdout


def test_uniform_is_not_compared_with_itself() -> None:
    study = empty_study()
    run_one(study, UNIFORM, label="named 5555")
    text = describe(read_findings(study), datetime.now())
    assert "best on the search's seed: 0.8659 nats per row, uniform\n" in text


def test_time_left_is_what_remains_over_what_runs() -> None:
    study = running_study()
    findings = read_findings(study)
    now = findings.trials[2].began
    assert now is not None
    usual = sum(t.seconds or 0 for t in findings.trials[:2]) / 2
    left = seconds_left(findings, now)
    assert left == pytest.approx((6 - 2 + 4) * usual, abs=1e-5)  # microseconds are kept
    later = seconds_left(findings, now + timedelta(seconds=usual))
    assert later == pytest.approx((6 - 2 + 4 - 1) * usual, abs=1e-5)
    late = seconds_left(findings, now + timedelta(seconds=5 * usual))
    assert late == pytest.approx(later, abs=1e-5)  # a slow trial takes no time off the others
    assert "time left: about" in describe(findings, now)


def test_a_search_whose_driver_may_be_dead_is_doubted() -> None:
    findings = read_findings(running_study())
    text = describe(findings, datetime.now() + timedelta(days=1))
    assert text.startswith("mine: running, or killed: nothing began since ")


def test_a_finished_search_says_who_won(tmp_path: Path) -> None:
    searched_study(storage=url(tmp_path, "mine"))
    result = status("--study", "mine", "--root", tmp_path)
    assert result.stdout.startswith("mine: finished\n")
    assert "wins; " in result.stdout
    assert "2 fresh seeds" in result.stdout
    assert "time left" not in result.stdout


def test_without_a_name_all_studies_are_listed(tmp_path: Path) -> None:
    running_study("one", url(tmp_path, "one"))
    empty_study("two", url(tmp_path, "two"))
    optuna.create_study(study_name="other", storage=url(tmp_path, "other"))
    result = status("--root", tmp_path)
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["one", "other", "two"]
    assert "running; 2 done, 1 running" in lines[0]
    assert lines[1] == "other: not made by mola-search"
    assert "nothing has run yet" in lines[2]


def test_a_storage_with_several_studies_is_listed(tmp_path: Path) -> None:
    shared = f"sqlite:///{tmp_path}/all.db"
    empty_study("b", shared)
    empty_study("a", shared)
    result = status("--storage", shared)
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--study", "none"), "there is no study 'none'"),
        (("--root", "nowhere"), "the folder nowhere does not exist"),
        (("--storage", "sqlite:///nowhere.db"), "nowhere.db does not exist"),
    ],
)
def test_what_is_not_there_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = status(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_empty_root_has_no_studies(tmp_path: Path) -> None:
    assert status("--root", tmp_path).stdout == "no studies\n"


def test_it_starts_without_the_heavy_libraries(tmp_path: Path) -> None:
    searched_study(storage=url(tmp_path, "mine"))
    code = (
        "import sys; from search.status import main\n"
        f"try: main(['--study', 'mine', '--root', {str(tmp_path)!r}])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'ray', 'transformers', 'pandas', 'matplotlib', 'datasets'}\n"
        "print(*(heavy & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.startswith("mine: finished"), result.stderr
    assert result.stderr.strip() == ""


def test_named_allocations_on_fresh_seeds_are_not_the_confirmation_yet() -> None:
    """They run there from the beginning: the search is not at its end, nor has one of them won."""
    study = running_study()
    run_one(study, PROPOSED)
    for allocation in (UNIFORM, TRIANGLE):
        for seed in (1, 2):
            run_one(study, allocation, label="replicate", seed=seed)
    findings = read_findings(study)
    assert findings.conclusion["fresh_seeds"] == []
    assert {tuple(row["experts"]) for row in findings.conclusion["table"]} == {
        a.experts for a in (UNIFORM, TRIANGLE, PROPOSED)
    }
    seconds = [t.seconds for t in findings.trials if t.state == "COMPLETE"]
    usual = sum(s for s in seconds if s) / len(seconds)
    now = findings.trials[2].began
    assert now is not None
    left = seconds_left(findings, now)
    assert left == pytest.approx((6 - 3 + 4 - 4) * usual, abs=1e-5)
    for seed in (1, 2):
        run_one(study, PROPOSED, label="replicate", seed=seed)
    assert read_findings(study).conclusion["fresh_seeds"] == [1, 2]
