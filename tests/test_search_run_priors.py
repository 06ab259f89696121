"""`--prior` and bounds per layer on the search's command line; workers pretend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner
from optuna_dashboard._note import get_note
from pretend_pool import PretendPool, no_waiting_for_the_disk
from test_search_run import Run, error_line, pools, reports, run, study_records

import search.priors.settle
import search.run
from mola.allocation import ExpertBudget
from search.priors.measure import Request
from studies.records import get_priors, study_spec
from studies.store import load_study

__all__ = ["no_waiting_for_the_disk", "pools", "reports", "run"]
pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the child process is asked to measure; it answers with 4, 1, 2, 3."""
    requests: list[Request] = []

    def answer(request: Request, *, quiet: bool) -> list[float]:
        requests.append(request)
        return [4.0, 1.0, 2.0, 3.0]

    monkeypatch.setattr(search.priors.settle, "measure", answer)
    return requests


def mine() -> optuna.Study:
    return load_study("mine", "sqlite:///runs/mine/study.db")


def labels() -> dict[str, str]:
    """The allocation of each label, of the trials that a search began with."""
    found = {}
    for record in study_records(Path("runs/mine")):
        if record.label not in ("search", "replicate"):
            found[record.label] = str(record.allocation)
    return found


def test_priors_run_after_the_named_ones_and_are_confirmed(
    run: Run, measured: list[Request]
) -> None:
    Path("bold.txt").write_text("1 1 4 6")
    Path("depth.json").write_text('{"scores": [1, 1, 2, 8.5]}')
    flags = [
        "--prior",
        "bold.txt",
        "--prior",
        "depth.json",
        "--prior",
        "alphalora",
        "--prior",
        "2468",
    ]
    result = run(*flags, trials=9)
    assert result.exit_code == 0, result.output
    found = labels()
    assert found["prior bold.txt"] == "1x2 4 6"
    assert found["prior depth.json"] == "2 1 3 6"
    assert found["prior alphalora"] == "5 1 2 4"
    assert "prior 2468" not in found  # it is one of the named ones anyway
    numbers = {r.label: r.number for r in study_records(Path("runs/mine"))}
    assert max(n for label, n in numbers.items() if label.startswith("named")) < min(
        n for label, n in numbers.items() if label.startswith("prior")
    )
    replicated = {str(r.allocation) for r in study_records(Path("runs/mine")) if r.seed != 0}
    assert {found["prior bold.txt"], found["prior depth.json"]} <= replicated
    assert "depth.json" in result.stdout
    assert get_priors(mine())["depth.json"] == {"experts": [2, 1, 3, 6], "scores": [1, 1, 2, 8.5]}
    assert get_priors(mine())["2468"]["scores"] is None


def test_a_prior_is_measured_once_and_other_priors_make_no_other_study(
    run: Run, measured: list[Request]
) -> None:
    first = run("--prior", "gradient", "--gpus-per-worker", "0", trials=7)
    assert first.exit_code == 0, first.output
    (request,) = measured
    assert (request.name, request.device, len(request.rows)) == ("gradient", "cpu", 32)
    again = run("--prior", "gradient", "--prior", "2882", trials=8)
    assert again.exit_code == 0, again.output
    assert len(measured) == 1
    assert set(get_priors(mine())) == {"gradient", "2882"}
    assert run(trials=9).exit_code == 0
    repeated = CliRunner().invoke(search.run.main, ["--config", "runs/mine/config.toml"])
    assert repeated.exit_code == 0, repeated.output


def test_the_written_settings_hold_priors_and_bounds(run: Run, measured: list[Request]) -> None:
    flags = ["--prior", "gradient", "--prior", "2882", "--fix", "0=2,3=5", "--max-experts", "6x4"]
    assert run(*flags, min_experts="0,1,1,0", trials=7).exit_code == 0
    spec = study_spec(mine())
    assert spec.budget == ExpertBudget(4, 12, [2, 1, 1, 5], [2, 6, 6, 5])
    repeated = CliRunner().invoke(search.run.main, ["--config", "runs/mine/config.toml"])
    assert repeated.exit_code == 0, repeated.output
    assert "is finished" in repeated.stderr
    assert study_spec(mine()) == spec


def test_a_dry_run_shows_priors_and_measures_nothing(
    run: Run, measured: list[Request], tmp_path: Path
) -> None:
    Path("mine.txt").write_text("1,2,3,6")
    result = run("--prior", "mine.txt", "--prior", "gradient", "--dry-run", trials=9)
    assert result.exit_code == 0, result.output
    assert "mine.txt: 1 2 3 6" in result.stdout
    assert "gradient: measured on the model when the search starts" in result.stdout
    assert measured == []
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.filterwarnings("default:--prior")
def test_a_prior_of_another_total_is_scaled_and_says_so(run: Run) -> None:
    Path("large.txt").write_text("2 4 6 12")
    result = run("--prior", "large.txt", trials=7)
    assert result.exit_code == 0, result.output
    assert (
        "2 4 6 12 (24 experts) is not in the budget; in proportion to it: 1 2 3 6" in result.stderr
    )
    assert labels()["prior large.txt"] == "1 2 3 6"


def test_a_prior_that_has_a_name_runs_once_and_says_so(run: Run) -> None:
    Path("rising.txt").write_text("1 2 4 5")
    result = run("--prior", "rising.txt", trials=6)
    assert "the prior rising.txt is the same allocation as 2468" in result.stderr
    assert "prior rising.txt" not in labels()


def test_a_prior_without_room_is_told_of(run: Run) -> None:
    Path("mine.txt").write_text("1 2 3 6")
    assert (
        "--trials 5 leaves no room for the allocation mine.txt"
        in run("--prior", "mine.txt", trials=5).stderr
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"scores": [1, 2]}', "--prior p.json: expected 4 scores, one per layer, got 2"),
        ('{"scores": [1, 2, 3, -1]}', "the score of layer 3 must be 0 or more, got -1.0"),
        ('{"scores": [1, 2, 3, NaN]}', "the score of layer 3 must be 0 or more, got nan"),
        ('{"scores": [1, 2, 3, "4"]}', "the score of layer 3 must be a number, got '4'"),
        ('{"scores": [1, 2, 3, true]}', "the score of layer 3 must be a number, got True"),
        ('{"scores": [0, 0, 0, 0]}', "all scores are 0"),
        ('{"scores": 3}', "scores must be a list of numbers"),
        ('{"scores": [1, 2, 3, 4], "beta": 2}', "unknown keys: beta"),
        ('{"weights": [1, 2, 3, 4]}', "format_version is None"),
        ("3 3 3", "the allocation has 3 layers, the model has 4"),
        ("0 0 0 0", "the allocation has no expert at all"),
        ("few", "'few' in the allocation 'few' is not a count"),
        ("", "is empty"),
        (b"\xff\xfe\x00", "p.json"),
    ],
)
def test_a_wrong_prior_is_one_line(run: Run, content: str | bytes, expected: str) -> None:
    path = Path("p.json")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert expected in error_line(run("--prior", "p.json"))
    assert not Path("runs").exists()


def test_an_unknown_prior_is_one_line_with_the_known_names(run: Run) -> None:
    line = error_line(run("--prior", "alpha"))
    assert (
        "--prior alpha: expected one of 5555, 2468, 2882, 8642, 8228, alphalora, gradient" in line
    )
    Path("other").mkdir()
    Path("a.txt").write_text("3x4")
    Path("other/a.txt").write_text("3x4")
    assert "called 'a.txt'" in error_line(run("--prior", "a.txt", "--prior", "other/a.txt"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"min_experts": "1,2"}, "--min-experts: expected one number, or one for each of 4 layers"),
        ({"max_experts": "9x5"}, "--max-experts: expected one number, or one for each of 4 layers"),
        ({"min_experts": "some"}, "'some' in the list 'some' is not a count"),
        ({"max_experts": 0}, "0 is less than 1"),
        ({"min_experts": -1}, "--min-experts"),
        ({"fix": "4=2"}, "--fix 4=2: the model's layers are 0 to 3"),
        ({"fix": "0"}, "'0' is not LAYER=N, such as 0=2"),
        ({"fix": "0=2,0=3"}, "layer 0 is fixed to both 2 and 3"),
        ({"fix": "0=99"}, "total=12 is out of reach"),
        ({"min_experts": "5,1,1,1", "max_experts": 4}, "layer 0 has low=5 above high=4"),
    ],
)
def test_wrong_bounds_are_one_line(run: Run, changes: dict[str, Any], expected: str) -> None:
    assert expected in error_line(run(**changes))
    assert not Path("runs").exists()


def test_bounds_per_layer_hold_in_every_trial_and_in_the_export(run: Run) -> None:
    result = run("--fix", "1=4", min_experts="1x2 2x2", trials=8)
    assert result.exit_code == 0, result.output
    records = study_records(Path("runs/mine"))
    budget = ExpertBudget(4, 12, [1, 4, 2, 2], [6, 4, 6, 6])
    assert len({r.allocation for r in records}) == 8
    assert all(r.allocation in budget for r in records)
    document = json.loads(Path("runs/mine/allocation.json").read_text())
    assert document["experts_per_layer"][1] == 4
    assert "1 4 2x2 to 6 4 6x2" in get_note(mine())
    other = error_line(run("--fix", "1=5", min_experts="1x2 2x2", trials=8))
    assert "(--min-experts, --fix): '1 5 2x2' here, '1 4 2x2' in the study" in other


def test_a_budget_of_one_allocation_stops_after_it(run: Run, pools: list[PretendPool]) -> None:
    pools.append(PretendPool())
    (pool,) = pools
    result = run("--fix", "0=3,1=3,2=2", trials=5)
    assert result.exit_code == 0, result.output
    assert "the budget and its bounds allow one allocation, no more" in result.stderr
    assert [(str(j.allocation), j.seed) for j in pool.jobs] == [("3x2 2 4", s) for s in (0, 1, 2)]
    assert "is finished" in run("--fix", "0=3,1=3,2=2", trials=5).stderr
    document = json.loads(Path("runs/mine/allocation.json").read_text())
    assert document["experts_per_layer"] == [3, 3, 2, 4]
