"""What a search takes from another one: the worth of layers, at any depth, total and budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pretend_pool import no_waiting_for_the_disk
from pretend_study import SPEC, searched_study
from test_search_run import Run, error_line, pools, reports, run, study_records

import search.run
from mola.allocation import Allocation, ExpertBudget
from search.priors.settle import settle_sources
from search.priors.transfer import Source, over_depth, read_source, recorded, transfer
from search.report.findings import read_findings
from search.report.origin import origin
from search.sampler import BudgetSampler
from search.sampler.features import FeatureMap
from studies.records import get_priors
from studies.store import load_study

__all__ = ["no_waiting_for_the_disk", "pools", "reports", "run"]
pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

UNIT = SPEC.objective


def source(*worth: float, total: int = 12) -> Source:
    return Source("other", "a model", "rows", UNIT, total, 9, worth)


def mine(name: str = "mine") -> optuna.Study:
    return load_study(name, f"sqlite:///runs/{name}/study.db")


# A busy machine is no failure.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=12), st.integers(1, 12), st.integers(1, 3))
def test_weights_over_depth_keep_their_mean(worth: list[int], layers: int, times: int) -> None:
    spread = over_depth(worth, layers)
    assert spread.mean() == pytest.approx(np.mean(worth), abs=1e-12)
    repeated = np.repeat(worth, times)
    np.testing.assert_allclose(over_depth(worth, len(repeated)), repeated, atol=1e-12)
    np.testing.assert_allclose(over_depth(repeated.tolist(), len(worth)), worth, atol=1e-12)


def test_experts_go_where_the_next_one_is_worth_most() -> None:
    budget, weights = ExpertBudget(4, 12, 0, 7), [3.0, 0.5, 1.0, -0.2]
    found = transfer(source(*weights), budget).allocation
    everywhere = [budget.member(rank) for rank in range(budget.size())]
    values = [float(np.log1p(a.experts) @ weights) for a in everywhere]
    assert found == everywhere[int(np.argmax(values))]
    assert found.experts[3] == 0


def test_nothing_known_is_uniform_and_no_direction() -> None:
    prior = transfer(source(0.0, 0.0), ExpertBudget(4, 12))
    assert prior.allocation == Allocation([3, 3, 3, 3])
    assert prior.belief == (0.0,) * 4


def test_weights_are_a_direction_like_that_of_an_allocation() -> None:
    budget, allocation = ExpertBudget(4, 12), Allocation([1, 2, 4, 5])
    weights = tuple(0.5 * n - 7 for n in allocation.experts)
    known = FeatureMap(budget, [allocation]).depth["priors"]
    np.testing.assert_allclose(FeatureMap(budget, [weights]).depth["priors"], known)
    with pytest.raises(ValueError, match="has 3 layers, expected 4"):
        BudgetSampler(budget, priors=[weights[:3]])


def test_a_study_knows_that_its_lower_layers_are_worth_more() -> None:
    known = read_source(searched_study(), UNIT)
    assert known.worth == tuple(sorted(known.worth, reverse=True))
    assert (known.total, len(known.worth), known.model) == (18, 6, SPEC.model_name)
    deeper = transfer(known, ExpertBudget(12, 48)).allocation
    assert deeper.total == 48
    assert list(deeper.experts) == sorted(deeper.experts, reverse=True)


def test_what_was_taken_stays_when_the_source_changes() -> None:
    study = searched_study()
    (first,) = settle_sources(study, SPEC, [source(1.0, 2.0, 3.0)])
    assert get_priors(study)["from other"]["source"]["worth"] == [1.0, 2.0, 3.0]
    (again,) = settle_sources(study, SPEC, [source(3.0, 2.0, 1.0)])
    (later,) = settle_sources(study, SPEC, [])
    assert first == again == later == recorded(study)[0]


def test_the_report_names_where_a_search_began(tmp_path: Path) -> None:
    study = searched_study()
    settle_sources(study, SPEC, [source(1.0, 2.0, 3.0)])
    part = origin(read_findings(study), tmp_path, None, recorded(study))
    assert ("began with", "other (12 experts over 3 layers, a model, rows, 9 trials)") in (
        part.tables[0].rows
    )


def test_a_search_begins_with_another_and_goes_on_without_it(run: Run, tmp_path: Path) -> None:
    assert run(study="first", trials=7, min_experts=0, confirm_seeds=0).exit_code == 0
    begun = run(budget=16, trials=6, warm_from="first", confirm_seeds=0)
    assert begun.exit_code == 0, begun.output
    (taken,) = recorded(mine())
    assert taken.name == "from first"
    assert taken.source is not None
    assert taken.source.worth[0] > taken.source.worth[3]  # as the pretending workers have it
    record = next(r for r in study_records(Path("runs/mine")) if r.label == "prior from first")
    assert record.allocation == taken.allocation
    assert record.allocation.total == 16
    (tmp_path / "runs/first/study.db").unlink()
    for again in (
        CliRunner().invoke(search.run.main, ["--config", "runs/mine/config.toml"]),
        run(budget=16, trials=7, confirm_seeds=0),
    ):
        assert again.exit_code == 0, again.output
    assert recorded(mine()) == [taken]
    assert mine().user_attrs["runs"][0]["command"].count("--warm-from first") == 1


def test_the_sampler_follows_the_direction(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    real = search.sampler.make_sampler
    monkeypatch.setattr(search.sampler, "make_sampler", lambda *a: told.append(a) or real(*a))
    run(study="first", trials=7, confirm_seeds=0)
    Path("mine.txt").write_text("1 2 3 6")
    told.clear()
    assert run("--prior", "mine.txt", warm_from="first", trials=7, confirm_seeds=0).exit_code == 0
    worth = recorded(mine())[0].scores
    assert told[-1][3] == [Allocation([1, 2, 3, 6]), worth]


def test_a_dry_run_shows_what_would_be_taken(run: Run) -> None:
    run(study="first", trials=7, confirm_seeds=0)
    shown = run("--dry-run", warm_from="first", budget=16, trials=8)
    assert shown.exit_code == 0, shown.output
    assert "from first: " in shown.stdout
    assert not Path("runs/mine").exists()


def test_a_source_that_says_nothing_is_one_line(run: Run, text_dir: Path, pools: list[Any]) -> None:
    assert "--warm-from none: there is no study 'none'" in error_line(run(warm_from="none"))
    assert "--warm-from mine: a search cannot begin with itself" in error_line(
        run(warm_from="mine")
    )
    run(study="few", trials=3, confirm_seeds=0)
    assert "--warm-from few: it has measured 3 allocations, and 6" in error_line(
        run(warm_from="few")
    )
    run(study="texts", data=text_dir, trials=2, confirm_seeds=0)
    line = error_line(run(warm_from="texts"))
    assert "--warm-from texts: its objective is nats per output token, that of this search" in line
    optuna.create_study(study_name="plain", storage=_new("plain"))
    assert "--warm-from plain: the study 'plain' was not made" in error_line(run(warm_from="plain"))
    assert not Path("runs/mine").exists()


def _new(name: str) -> str:
    Path(f"runs/{name}").mkdir(parents=True)
    return f"sqlite:///runs/{name}/study.db"
