"""The report: what it says first, that it stands alone, that no name breaks it, nothing leaks."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import optuna
import pytest
from click.testing import CliRunner
from pretend_pool import no_waiting_for_the_disk
from pretend_study import SPEC, empty_study, objective, run_one, searched_study

from mola.allocation import Allocation
from search.full.results import Conditions, Run, Scores
from search.full.store import CONDITIONS_ATTR, record_run
from search.priors.named import named
from search.report import figures, layer_figures
from search.report.__main__ import main
from search.report.drawing import VARIABLES
from search.report.findings import read_findings
from search.report.marginal import worth_by_layer
from search.report.sections import verdict
from search.report.write import write_report
from studies.records import get_conclusion
from studies.store import set_conclusion

__all__ = ["no_waiting_for_the_disk"]
VOID = {"meta", "path", "use", "rect", "br"}


class Page(HTMLParser):
    """Collects what matters of a page, and fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._note(attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            assert value is not None
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.links.append(value)
            self.references += re.findall(r"url\(#([^)]*)\)", value)


@pytest.fixture(scope="module")
def study() -> optuna.Study:
    return searched_study()


@pytest.fixture(scope="module")
def html(study: optuna.Study, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(study, tmp_path_factory.mktemp("runs"), None).read_text(encoding="utf-8")


def test_the_conclusion_comes_first_with_interval_and_seeds(html: str) -> None:
    words = " ".join(Page(html).words.split())
    start = words.index("Expert allocation search: mine", 30)
    first = words[start : words.index("Comparison with uniform")]
    assert re.search(
        r"has the lowest mean validation loss: [\d.]+ ± [\d.]+ nats per row over 3", first
    )
    assert re.search(r"95% interval \[[-+][\d.]+, [-+][\d.]+\], 2 fresh seeds", first)
    assert len(verdict(read_findings(searched_study()))) == 2


def test_it_needs_nothing_else(html: str) -> None:
    page = Page(html)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "image"}
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in html
    known = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"'<> ]+", html)) <= known


def test_ids_are_unique_and_every_reference_is_met(html: str) -> None:
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    wanted = {link[1:] for link in page.links} | set(page.references)
    assert wanted
    assert wanted <= set(page.ids)


def test_all_sections_of_a_finished_search_are_there(html: str) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", html)
    assert titles == [
        "Comparison with uniform",
        "Allocations",
        "The search",
        "Short and longer training",
        "Loss and accuracy",
        "What an expert is worth, by depth",
        "Routing of the winner",
        "Time and cost",
        "To repeat it",
    ]
    assert html.count("<figure>") == 9


def test_names_cannot_turn_into_markup(html: str) -> None:
    assert "<script" not in html
    assert "rows&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "org/&lt;i&gt;model&lt;/i&gt;" in html
    assert "the worker &lt;b&gt;died&lt;/b&gt;" in html


def test_markdown_says_the_same_and_is_escaped(study: optuna.Study, tmp_path: Path) -> None:
    text = write_report(study, tmp_path, None).with_name("report.md").read_text(encoding="utf-8")
    assert text.startswith("# Expert allocation search: mine\n\nOf ")
    assert "rows\\<script\\>alert(1)\\</script\\>" in text
    assert "## Time and cost" in text
    assert "    python -m search.run --budget 18\n" in text
    widths = {line.count(" | ") for line in text.splitlines() if line.startswith("| uniform")}
    assert widths == {4, 1}
    assert re.search(r"^    uniform  ▄{6}$", text, re.MULTILINE)


def test_a_password_never_appears(study: optuna.Study, tmp_path: Path) -> None:
    url = "postgresql://me:hunter2@db.example/x?sslpassword=hunter2"
    path = write_report(study, tmp_path, url)
    for file in (path, path.with_name("report.md")):
        text = file.read_text(encoding="utf-8")
        assert "hunter2" not in text
        assert "db.example" in text


def test_everything_that_repeats_the_search_is_there(html: str) -> None:
    words = Page(html).words
    for part in (
        "weights-0123",
        "rows-4567",
        "python -m search.run --budget 18",
        "version of torch",
        "processor",
        "0, 1, 2",
        "100 to train, 20 to validate",
    ):
        assert part in words, part


def test_the_same_study_gives_the_same_page(study: optuna.Study, html: str, tmp_path: Path) -> None:
    again = write_report(study, tmp_path, None).read_text(encoding="utf-8")
    elsewhere = re.compile(r"--root [^\s<]+")
    assert elsewhere.sub("--root", again) == elsewhere.sub("--root", html)


def test_figures_take_their_colours_from_the_page(html: str) -> None:
    style = html[html.index("<style>") : html.index("</style>")]
    for stand_in, variable in VARIABLES.items():
        assert stand_in not in html
        assert style.count(f"{variable}:") == 2, variable  # light and dark


def test_every_figure_has_its_unit(study: optuna.Study) -> None:
    findings = read_findings(study)
    assert findings.winner is not None
    base = Allocation(findings.winner["experts"])
    worths = worth_by_layer(study, SPEC.budget, base, 0.01)
    unit = "nats per row"
    assert unit in figures.progress(findings)
    assert unit in figures.seeds(findings)
    assert unit in figures.accuracy(findings)
    assert "accuracy, %" in figures.accuracy(findings)
    assert unit in figures.curves(findings)
    assert "optimizer steps" in figures.curves(findings)
    assert unit in layer_figures.worth(worths, unit)
    assert "layer" in layer_figures.allocations(findings)
    assert "picks, %" in layer_figures.routing(findings.complete[0])
    assert "minutes of" in figures.time(findings)


def test_a_search_under_way_is_reported_as_far_as_it_is(tmp_path: Path) -> None:
    study = empty_study()
    run_one(study, named("5555", SPEC.budget), label="named 5555")
    run_one(study, named("8642", SPEC.budget), label="named 8642")
    run_one(study, named("2468", SPEC.budget), label="named 2468", end="leave")
    html = write_report(study, tmp_path, None).read_text(encoding="utf-8")
    words = Page(html).words
    assert "The search is not finished" in words
    assert "Not compared with uniform: no allocation was run again" in words
    assert "2 complete, 1 running" in words
    assert "too few to say" in words


def test_a_study_without_results_says_so(tmp_path: Path) -> None:
    html = write_report(empty_study(), tmp_path, None).read_text(encoding="utf-8")
    words = Page(html).words
    assert "No allocation has finished" in words
    assert "none yet" in words
    assert "<figure>" not in html


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_the_command_writes_both_files(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/all.db"
    searched_study(storage=url)
    result = CliRunner().invoke(
        main, ["--study", "mine", "--root", str(tmp_path), "--storage", url]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == f"wrote {tmp_path}/mine/report.html and report.md\n"
    assert (tmp_path / "mine" / "report.md").exists()


def test_a_study_that_is_missing_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--study", "none", "--root", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: there is no study 'none'")
    assert result.stderr.count("\n") == 1


def test_full_fine_tunes_stand_beside_the_short_runs(tmp_path: Path) -> None:
    study = searched_study()
    conditions = Conditions(
        experts=(),
        seed=10,
        model=SPEC.model,
        model_fingerprint="m",
        data="d",
        data_fingerprint="d",
        objective=SPEC.objective,
        prompt_template=None,
        max_length=64,
        adapter=SPEC.adapter,
        train=SPEC.train,
        mixed_precision="no",
        processes=1,
    )
    full = optuna.create_study(study_name="mine.full", storage=study._storage)
    full.set_user_attr(CONDITIONS_ATTR, json.dumps(asdict(conditions)))
    for name in ("5555", "2468", "8642"):
        allocation = named(name, SPEC.budget)
        for seed in (10, 11):
            scores = Scores(objective(allocation, 0) / 2 + seed / 100, 0.8, 0.01, 20)
            record_run(full, Run(name, allocation.experts, seed, 10, 60.0, scores, scores))
    html = write_report(study, tmp_path, None).read_text(encoding="utf-8")
    section = html[html.index("<h2>Full fine-tunes</h2>") : html.index("<h2>Allocations</h2>")]
    assert "loss at full length, nats per row" in section
    assert "rank correlation +1.00 over 3 allocations" in section
    assert re.search(r"8642</td><td>18</td><td>0\.\d{4} ± 0.0050</td><td>80.0%</td>", section)
    assert section.index(">8642<") < section.index(">2468<")  # the lowest loss first
    Page(html)


def test_who_dropped_out_of_the_race_is_named(tmp_path: Path) -> None:
    study = searched_study()
    write_report(study, tmp_path, None)
    path = tmp_path / study.study_name / "report.md"
    assert "not run on the rest" not in path.read_text(encoding="utf-8")
    conclusion = get_conclusion(study)
    assert conclusion is not None
    conclusion["table"][-1]["dropped"] = True
    set_conclusion(study, conclusion)
    write_report(study, tmp_path, None)
    assert "not run on the rest: " in path.read_text(encoding="utf-8")
