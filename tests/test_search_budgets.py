"""Several budgets in one go; workers pretend that lower layers want the experts."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from pretend_pool import PretendPool, no_waiting_for_the_disk
from test_search_report import Page
from test_search_run import Interrupting, Run, error_line, pools, reports, run

import search.job
import search.report.__main__
import search.report.dashboard
import search.report.write
import search.run
import search.status
from mola.allocation import Allocation
from mola.count import parameters_per_expert
from mola.settings import AdapterSettings, ModelSource
from search.budgets.compare import Budgets, Difference, read_budgets
from search.budgets.members import find_members
from search.budgets.report import verdict
from search.priors.transfer import recorded
from studies.stats import t_quantile
from studies.store import load_study, records

__all__ = ["no_waiting_for_the_disk", "pools", "reports", "run"]
pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

TOTALS = (8, 12, 16)


@dataclass
class Done:
    """A search over three budgets that ended well."""

    result: Result
    opened: list[PretendPool]
    folder: Path
    words: list[str]

    @cached_property
    def budgets(self) -> Budgets:
        return read_budgets("mine", find_members("mine", self.folder / "runs", None))


@pytest.fixture(scope="module")
def done(
    tiny_model_dir: Path, choices_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Done]:
    folder = tmp_path_factory.mktemp("several")
    opened: list[PretendPool] = []

    def open_pool(*_: Any) -> PretendPool:
        opened.append(PretendPool())
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(search.job, "_open_pool", open_pool)
        patch.setattr(search.report.write, "write_report", lambda *_: None)
        patch.setattr(search.report.dashboard, "refresh", lambda *_: None)
        words = ["--model", str(tiny_model_dir), "--data", str(choices_dir), "--steps", "4"]
        words += ["--budget", "8,12,16", "--trials", "7", "--study", "mine"]
        words += ["--confirm-seeds", "2", "--finalists", "1"]
        yield Done(CliRunner().invoke(search.run.main, words), opened, folder, words)


def study(done: Done, total: int) -> Any:
    return load_study(f"mine-{total}", f"sqlite:///{done.folder}/runs/mine-{total}/study.db")


def test_each_budget_is_a_study_of_its_own(done: Done) -> None:
    assert done.result.exit_code == 0, done.result.output
    for total in TOTALS:
        trials = records(study(done, total))
        assert {r.allocation.total for r in trials} == {total}
        assert len({r.allocation for r in trials}) == 7
        assert (done.folder / f"runs/mine-{total}/allocation.json").exists()
    assert done.result.stdout.count("Winner: trial") == 3


def test_the_workers_are_started_once_and_ended(done: Done) -> None:
    (pool,) = done.opened
    assert pool.closed
    assert {job.allocation.total for job in pool.jobs} == set(TOTALS)


def test_a_budget_begins_with_what_the_one_before_has_found(done: Done) -> None:
    assert recorded(study(done, 8)) == []
    for before, total in ((8, 12), (12, 16)):
        (taken,) = recorded(study(done, total))
        assert taken.source is not None
        assert (taken.source.study, taken.source.total) == (f"mine-{before}", before)
        assert f"prior from mine-{before}" in {r.label for r in records(study(done, total))}


def test_the_same_settings_have_nothing_left_to_do(done: Done) -> None:
    before = [study(done, total).user_attrs["priors"] for total in TOTALS[1:]]
    again = CliRunner().invoke(search.run.main, ["--config", "runs/mine/config.toml"])
    assert again.exit_code == 0, again.output
    assert again.stderr.count("is finished") == 3
    assert again.stdout == done.result.stdout
    assert len(done.opened) == 1
    assert [study(done, total).user_attrs["priors"] for total in TOTALS[1:]] == before
    assert study(done, 12).user_attrs["runs"][0]["command"].count("--budget 8,12,16") == 1


def test_steps_are_paired_differences_with_intervals_over_all_pairs(done: Done) -> None:
    found = done.budgets
    assert (found.seeds, found.fresh) == ((1, 2), True)
    by_total = []
    for total in TOTALS:
        values: dict[Allocation, dict[int, float]] = {}
        for r in records(study(done, total)):
            if r.state == "COMPLETE" and r.objective is not None:
                values.setdefault(r.allocation, {})[r.seed] = r.objective
        by_total.append({a: [v[1], v[2]] for a, v in values.items() if {1, 2} <= set(v)})
    y = np.array([v for values in by_total for v in values.values()])
    residual = y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()
    df = len(y) - 1
    pairs = sum(len(by_total[i]) * len(by_total[j]) for i, j in ((0, 1), (1, 2), (0, 2)))
    half = t_quantile(1 - 0.025 / pairs, df) * np.sqrt(2 * (residual**2).sum() / df / 2)
    assert [(s.low, s.high) for s in found.steps] == [(8, 12), (12, 16), (8, 16)]
    for step, i, j in zip(found.steps, (0, 1, 0), (1, 2, 2), strict=True):
        low, high = found.members[i].winner, found.members[j].winner
        assert low is not None and high is not None and step.winners is not None
        apart = np.subtract(by_total[j][high.allocation], by_total[i][low.allocation]).mean()
        assert step.winners.mean == pytest.approx(apart)
        assert step.winners.low == pytest.approx(apart - half)
        assert step.winners.high == pytest.approx(apart + half)


def test_parameters_are_those_of_the_winners(done: Done) -> None:
    each = study(done, 8).user_attrs["parameters_per_expert"]
    for member in done.budgets.members:
        assert member.winner is not None
        counts = member.winner.allocation.experts
        assert member.winner.parameters == sum(n * p for n, p in zip(counts, each, strict=True))
    assert [p.parameters for p in done.budgets.pareto] == [t * each[0] for t in TOTALS]


def test_the_numbers_of_parameters_are_the_published_ones(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path)  # LLaMA-2-7B's widths
    assert parameters_per_expert(ModelSource(str(tmp_path)), AdapterSettings()) == (660_224,) * 2


def test_the_end_says_which_step_pays(done: Done) -> None:
    summary = done.result.stdout.partition("Budgets of mine")[2]
    assert "Experts buy a measurable gain from 8 to 12, 12 to 16." in summary
    row = next(line for line in summary.splitlines() if line.startswith("      8 "))
    assert re.fullmatch(r" +8 +[\d,]+ +trial \d+ +\d\.\d{4} +\d\.\d{4} *", row)
    assert "From 8 to 16 experts the winner's loss changes by -" in summary
    assert "runs/mine/report.html" in summary


def altered(found: Budgets, *winners: Difference | None) -> Budgets:
    steps = tuple(replace(s, winners=w) for s, w in zip(found.steps, winners, strict=True))
    return replace(found, steps=steps)


def test_what_may_be_claimed_of_steps(done: Done) -> None:
    gain, nothing = Difference(-0.2, -0.3, -0.1), Difference(-0.1, -0.3, 0.1)
    first = verdict(altered(done.budgets, gain, nothing, gain))
    assert first[0] == "Experts buy a measurable gain from 8 to 12."
    assert first[1] == "Beyond 12 experts no step's gain can be told from nothing."
    whole = verdict(altered(done.budgets, nothing, nothing, gain))
    assert whole[0].startswith("No step from a budget to the next buys a gain that can be told")
    assert whole[1] == "From 8 to 16 altogether the gain is measurable."
    none = verdict(altered(done.budgets, nothing, nothing, nothing))
    assert "altogether" not in " ".join(none)
    assert "-0.1000 [-0.3000, +0.1000]" in none[1]
    unknown = Difference(-0.2, None, None)
    (said,) = verdict(altered(done.budgets, unknown, None, unknown))
    assert said == "Which budget pays cannot be said: too little ran on fresh seeds."


def test_a_smaller_winner_that_is_as_good_leaves_the_larger_one_off_the_line(done: Done) -> None:
    found = done.budgets
    small, middle, _ = found.members
    assert small.winner is not None and middle.winner is not None
    worse = replace(middle, winner=replace(middle.winner, mean=small.winner.mean))
    line = replace(found, members=(small, worse, found.members[2])).pareto
    assert [p.allocation.total for p in line] == [8, 16]


def test_the_report_stands_alone_and_shows_the_line(done: Done) -> None:
    html = (done.folder / "runs/mine/report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "image"}
    assert len(page.ids) == len(set(page.ids))
    assert set(page.references) <= set(page.ids)
    for words in ("trainable parameters, millions", "Which step pays", "mine-12", "8,12,16"):
        assert words in page.words
    text = (done.folder / "runs/mine/report.md").read_text(encoding="utf-8")
    assert "Experts buy a measurable gain" in text


def test_status_and_report_know_the_common_name(done: Done) -> None:
    result = CliRunner().invoke(search.status.main, ["--study", "mine"])
    assert result.exit_code == 0, result.output
    for total in TOTALS:
        assert f"mine-{total}: finished" in result.stdout
    assert "mine, its budgets together:\n  Experts buy a measurable gain" in result.stdout
    (done.folder / "runs/mine/report.html").unlink()
    again = CliRunner().invoke(search.report.__main__.main, ["--study", "mine"])
    assert again.exit_code == 0, again.output
    assert (done.folder / "runs/mine/report.html").exists()


def test_a_name_is_one_study_or_several_budgets(done: Done) -> None:
    words = [w if w != "8,12,16" else "8" for w in done.words]
    line = error_line(CliRunner().invoke(search.run.main, words))
    assert "--study mine: several budgets bear this name: mine-8, mine-12, mine-16" in line
    words = [w if w != "mine" else "mine-8" for w in done.words]
    line = error_line(CliRunner().invoke(search.run.main, words))
    assert "--study mine-8: there is a study of this name with one budget" in line


def test_a_dry_run_plans_all_budgets_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    result = run("--dry-run", budget="8,12", study=None)
    assert result.exit_code == 0, result.output
    assert re.search(
        r"2 budgets, one after the other, on the same workers: \S+-8, \S+-12\.", result.stdout
    )
    assert "8 experts over 4 layers" in result.stdout
    assert "12 experts over 4 layers" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("8,8", "'8,8' has a budget twice"),
        ("8,many", "'8,many' is not a whole number from 1, or several with commas"),
        ("8,", "'8,' is not a whole number"),
        ("8,3", "total=3 is out of reach for 4 layers"),
        ("8,0", "'8,0' is not a whole number from 1"),
    ],
)
def test_a_wrong_list_of_budgets_is_one_line(
    run: Run, tmp_path: Path, budget: str, expected: str
) -> None:
    assert expected in error_line(run(budget=budget))
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_the_second_budget_goes_on_there(
    run: Run, pools: list[PretendPool], tmp_path: Path
) -> None:
    class Later(Interrupting):
        """The person presses Ctrl-C when the second budget has begun."""

        def poll(self, timeout_seconds: float) -> list[Any]:
            if {job.allocation.total for job in self.jobs} <= {8}:
                return PretendPool.poll(self, timeout_seconds)
            return super().poll(timeout_seconds)

    pool = Later(signal.SIGINT)
    pools.append(pool)
    stopped = run(budget="8,12")
    assert stopped.exit_code == 130, stopped.output
    assert pool.closed
    assert "To go on: python -m search.run --config runs/mine/config.toml" in stopped.stderr
    first = records(load_study("mine-8", "sqlite:///runs/mine-8/study.db"))
    again = run(budget="8,12")
    assert again.exit_code == 0, again.output
    assert "The study mine-8 is finished" in again.stderr
    assert records(load_study("mine-8", "sqlite:///runs/mine-8/study.db")) == first
    assert "Budgets of mine" in again.stdout
