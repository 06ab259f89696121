"""The comparison in full: each run once, through failures and interruptions, kept in the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner, Result
from pretend_study import SPEC as PRETEND
from pretend_study import searched_study

import search.compare
import search.full.compare_job
from mola.allocation import Allocation
from mola.base import load_tokenizer, model_fingerprint
from mola.data import TaskData, encode_splits, load_splits
from mola.events import Finished, Step
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from search.compare import main
from search.deadline import Deadline
from search.full.compare_job import StopRequestedError, Wanted, finish_runs, missing_runs
from search.full.print_runs import pareto
from search.full.results import CHECKPOINT, Conditions, Run, Scores
from search.full.store import (
    comparison_name,
    find_comparison,
    open_comparison,
    record_run,
    runs_of,
)
from search.full.worker import FullJob, FullWorker
from search.workers.pool import Failed, Job
from search.workers.proxy import Task
from studies.records import SPEC_ATTR
from studies.store import complete, enqueue, mark, set_conclusion

ONE, TWO = Allocation([1, 2, 3, 2]), Allocation([2, 2, 2, 2])
CONDITIONS = Conditions(
    experts=(),
    seed=10,
    model=ModelSource(),
    model_fingerprint="m",
    data="d",
    data_fingerprint="d",
    objective="nats per row",
    prompt_template=None,
    max_length=64,
    adapter=AdapterSettings(),
    train=TrainSettings(steps=4),
    mixed_precision="as the frozen weights",
    processes=1,
)


def run_of(job: FullJob, value: float = 0.5, test: float | None = 0.6) -> Run:
    scores = Scores(value + 0.1 * job.seed, 0.8, 0.01, 10)
    tested = None if test is None else Scores(test + 0.1 * job.seed, 0.7, 0.01, 10)
    return Run(job.name, job.allocation.experts, job.seed, 4, 12.0, scores, tested)


class FullPool:
    """Takes one step of each running fine-tune per poll; one hangs whose script has no end.

    None in a script: nothing is heard.
    """

    def __init__(self, size: int = 2, script: Callable[[FullJob], list[Any]] | None = None) -> None:
        self.size = size
        self.script = script or (lambda job: [Step(2, 1.0), Step(4, 0.9), run_of(job)])
        self.running: dict[int, list[Any]] = {}
        self.started: list[FullJob] = []
        self.stopped: list[int] = []
        self.killed: list[int] = []
        self.closed = False

    @property
    def idle(self) -> int:
        return self.size - len(self.running)

    def start(self, job: Job) -> None:
        assert isinstance(job, FullJob)
        self.started.append(job)
        self.running[job.number] = self.script(job)

    def poll(self, timeout_seconds: float) -> list[tuple[int, Any]]:
        heard = [(number, left.pop(0)) for number, left in self.running.items() if left]
        events = [(number, event) for number, event in heard if event is not None]
        for number, event in events:
            if isinstance(event, (Run, Failed)):
                del self.running[number]
        return events

    def resume(self, number: int) -> None:
        raise AssertionError("a full fine-tune has no rungs")

    def stop(self, number: int) -> None:
        self.stopped.append(number)
        del self.running[number]

    def kill(self, number: int) -> None:
        self.killed.append(number)
        del self.running[number]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def comparison(tmp_path: Path) -> optuna.Study:
    return opened(tmp_path)


def opened(tmp_path: Path, conditions: Conditions = CONDITIONS) -> optuna.Study:
    url = f"sqlite:///{tmp_path}/study.db"
    if not (tmp_path / "study.db").exists():
        optuna.create_study(study_name="mine", storage=url)
    return open_comparison("mine", url, conditions)


def wanted(tmp_path: Path, *seeds: int) -> Wanted:
    return Wanted({"winner": ONE, "5555": TWO}, seeds, 4, tmp_path / "full")


def finish(study: optuna.Study, jobs: list[FullJob], pool: FullPool, **how: Any) -> list[FullJob]:
    stop, say = how.get("stop", lambda: False), how.get("say", lambda line: None)
    return finish_runs(study, jobs, 4, pool, say, stop, how.get("deadline", Deadline()))


def test_each_run_is_done_once_seed_by_seed(comparison: optuna.Study, tmp_path: Path) -> None:
    jobs = missing_runs(comparison, wanted(tmp_path, 10, 11))
    assert [(j.seed, j.name) for j in jobs] == [
        (10, "winner"),
        (10, "5555"),
        (11, "winner"),
        (11, "5555"),
    ]
    assert jobs[0].folder == tmp_path / "full" / "winner-seed-10"
    assert finish(comparison, jobs, FullPool()) == []
    assert missing_runs(opened(tmp_path), wanted(tmp_path, 10, 11)) == []
    more = missing_runs(comparison, wanted(tmp_path, 10, 11, 12))
    assert [(j.seed, j.name) for j in more] == [(12, "winner"), (12, "5555")]


def test_results_come_back_from_the_store_as_they_were(
    comparison: optuna.Study, tmp_path: Path
) -> None:
    job = missing_runs(comparison, wanted(tmp_path, 10))[0]
    for run in (run_of(job), run_of(replace(job, seed=11), test=None)):
        record_run(comparison, run)
    assert runs_of(opened(tmp_path)) == [run_of(job), run_of(replace(job, seed=11), test=None)]
    trial = comparison.trials[0]
    assert trial.params["experts_02"] == 3
    assert trial.value == run_of(job).validation.objective


def test_a_run_that_fails_is_tried_once_more(comparison: optuna.Study, tmp_path: Path) -> None:
    jobs = missing_runs(comparison, wanted(tmp_path, 10))
    tries = {0: 0, 1: 0}

    def script(job: FullJob) -> list[Any]:
        tries[job.number] += 1
        if job.number == 0 and tries[0] == 1:
            return [Failed("the worker died")]
        if job.number == 1:
            return [Failed("the loss is nan", retry=False)]
        return [run_of(job)]

    lines: list[str] = []
    lost = finish(comparison, jobs, FullPool(script=script), say=lines.append)
    assert lost == [jobs[1]]
    assert tries == {0: 2, 1: 1}
    assert "winner, seed 10 failed: the worker died" in lines
    assert [run.name for run in runs_of(comparison)] == ["winner"]
    assert missing_runs(comparison, wanted(tmp_path, 10))[0].name == "5555"


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a quarter of an hour pass between two looks at the clock."""

    class Hours:
        seconds = 0.0

        def look(self) -> float:
            self.seconds += 900
            return self.seconds

    monkeypatch.setattr(search.full.compare_job, "AwakeClock", Hours)


def test_a_run_whose_worker_hangs_is_ended_and_tried_once_more(
    comparison: optuna.Study, tmp_path: Path, hours: None
) -> None:
    jobs = missing_runs(comparison, wanted(tmp_path, 10))
    tries = {0: 0, 1: 0}

    def script(job: FullJob) -> list[Any]:
        tries[job.number] += 1
        hangs = job.number == 1 or tries[0] == 1
        return [Step(2, 1.0)] if hangs else [Step(2, 1.0), run_of(job)]

    lines: list[str] = []
    pool = FullPool(script=script)
    assert finish(comparison, jobs, pool, say=lines.append) == [jobs[1]]
    assert tries == {0: 2, 1: 2}
    assert sorted(pool.killed) == [0, 1, 1]
    assert [run.name for run in runs_of(comparison)] == ["winner"]
    reason = "nothing heard of it for 3600 s (--trial-timeout), its worker was ended"
    assert f"winner, seed 10 failed: {reason}" in lines


@pytest.mark.parametrize(
    "trained", [False, True], ids=["anew", "from a checkpoint of the last step"]
)
def test_an_evaluation_may_be_silent_for_hours(
    comparison: optuna.Study, tmp_path: Path, hours: None, trained: bool
) -> None:
    (job, *_) = missing_runs(comparison, wanted(tmp_path, 10))
    if trained:
        job.folder.mkdir(parents=True)
        (job.folder / CHECKPOINT).touch()
    steps = [] if trained else [Step(2, 1.0), Step(4, 0.9)]
    pool = FullPool(script=lambda job: [*steps, *[None] * 12, run_of(job)])
    assert finish(comparison, [job], pool) == []
    assert pool.killed == []
    assert [run.name for run in runs_of(comparison)] == ["winner"]


def test_the_time_of_others_and_a_limit_hold_for_an_evaluation_too(
    comparison: optuna.Study, tmp_path: Path, hours: None
) -> None:
    (job, *_) = missing_runs(comparison, wanted(tmp_path, 10))
    for deadline in (Deadline(2 * 3600.0), Deadline(slowest=720.0)):
        pool = FullPool(script=lambda job: [Step(4, 0.9)])
        assert finish(comparison, [job], pool, deadline=deadline) == [job]
        assert pool.killed == [0, 0]


def test_a_limit_that_was_given_counts_from_the_start(
    comparison: optuna.Study, tmp_path: Path, hours: None
) -> None:
    jobs = missing_runs(comparison, wanted(tmp_path, 10))[:1]
    pool = FullPool(script=lambda job: [Step(1, 1.0)] * 99)
    assert finish(comparison, jobs, pool, deadline=Deadline(2 * 3600.0)) == jobs
    assert pool.killed == [0, 0]


def test_a_stop_saves_what_runs_and_keeps_what_is_done(
    comparison: optuna.Study, tmp_path: Path
) -> None:
    jobs = missing_runs(comparison, wanted(tmp_path, 10, 11))
    pool = FullPool()
    asked = iter([False, False, False, False, True])
    with pytest.raises(StopRequestedError):
        finish(comparison, jobs, pool, stop=lambda: next(asked))
    assert [(run.seed, run.name) for run in runs_of(comparison)] == [(10, "winner"), (10, "5555")]
    assert pool.stopped == [2, 3]
    assert len(missing_runs(comparison, wanted(tmp_path, 10, 11))) == 2


def test_other_conditions_are_refused_by_name(comparison: optuna.Study, tmp_path: Path) -> None:
    other = replace(CONDITIONS, train=TrainSettings(steps=8))
    with pytest.raises(ValueError, match=r"'mine.full' .* train.steps: 8 here, 4 there"):
        opened(tmp_path, other)


def test_it_is_found_from_the_study_of_the_search(comparison: optuna.Study) -> None:
    found = find_comparison(optuna.load_study(study_name="mine", storage=comparison._storage))
    assert found is not None
    assert found.study_name == comparison_name("mine") == "mine.full"
    assert find_comparison(searched_study()) is None


def test_the_pareto_line_leaves_out_what_costs_more_and_is_no_better() -> None:
    def runs(experts: tuple[int, ...], value: float) -> list[Run]:
        job = FullJob(0, Allocation(experts), 0, name="")
        return [run_of(job, value, value)]

    found = {"big": runs((4, 4), 0.4), "small": runs((1, 1), 0.6), "poor": runs((2, 4), 0.7)}
    assert pareto(found, True) == ["small", "big"]
    assert pareto({"a": runs((2, 2), 0.1), "b": runs((1, 3), 0.2)}, True) == []


@pytest.fixture(scope="module")
def task(tiny_model_dir: Path, choices_dir: Path) -> tuple[Task, TaskData]:
    source = ModelSource(str(tiny_model_dir))
    data = encode_splits(
        load_splits(str(choices_dir)),
        load_tokenizer(source),
        prompt_template=None,
        max_length=256,
        name="choices",
    )
    train = TrainSettings(steps=4, batch_size=8, learning_rate=1e-2)
    return Task(source, AdapterSettings(r=2), train), data


def test_a_worker_that_was_stopped_goes_on_where_it_was(
    task: tuple[Task, TaskData], tmp_path: Path
) -> None:
    worker = FullWorker(*task, "cpu", 1)
    worker.load()
    job = FullJob(0, ONE, 1, name="winner", folder=tmp_path / "parts")
    (first,) = worker.start(job, 0.0)
    assert (first.step, (job.folder / CHECKPOINT).exists()) == (1, False)
    worker.stop()
    assert (job.folder / CHECKPOINT).exists()
    events = worker.start(job, 1000.0)
    assert [event.step for event in events] == [2, 3, 4]  # told of before the evaluation
    (parts,) = worker.advance(1000.0)
    events = worker.start(replace(job, folder=tmp_path / "whole"), 1000.0)
    assert [event.step for event in events] == [1, 2, 3, 4]
    (whole,) = worker.advance(1000.0)
    assert replace(parts, train_seconds=0) == replace(whole, train_seconds=0)
    assert whole.test is not None
    assert (job.folder / "adapter_config.json").exists()


def real_study(root: Path, model: Path, data: Path) -> None:
    """A study of the tiny model with a winner, as a search leaves it."""
    (root / "mine").mkdir(parents=True)
    study = optuna.create_study(study_name="mine", storage=f"sqlite:///{root}/mine/study.db")
    spec = replace(
        PRETEND,
        num_layers=4,
        total=8,
        high=4,
        model=ModelSource(str(model)),
        model_fingerprint=model_fingerprint(ModelSource(str(model))),
        data="choices",
        max_length=256,
        adapter=AdapterSettings(r=2),
    )
    study.set_user_attr(SPEC_ATTR, spec.to_json())
    enqueue(study, ONE, label="search", seed=0)
    trial = study.ask()
    for layer in range(4):
        trial.suggest_int(f"experts_{layer:02d}", 1, 4)
    mark(trial, label="search", seed=0)
    complete(study, trial, Finished(4, 1.0, 0.5, 0.01, 1.0, 0.1))
    conclusion = {"text": "", "winner": 0, "table": [], "fresh_seeds": [], "confidence": 0.95}
    set_conclusion(study, conclusion)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_command_compares_on_real_workers_and_goes_on(
    tmp_path: Path,
    tiny_model_dir: Path,
    choices_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_study(tmp_path, tiny_model_dir, choices_dir)
    other = tmp_path / "small.txt"
    other.write_text("1 1 1 1")

    def compare(*words: str) -> Result:
        given = ["--study", "mine", "--root", str(tmp_path), "--data", str(choices_dir)]
        given += ["--epochs", "1", "--batch-size", "8", "--learning-rate", "0.01"]
        return CliRunner().invoke(main, [*given, "--workers", "1", *words])

    optuna.logging.set_verbosity(optuna.logging.INFO)
    result = compare("--with", "5555", str(other), "--seeds", "2")
    assert result.exit_code == 0, result.output
    printed = " ".join(result.stdout.split())
    assert "trial-0: 1 2 3 2 (8 experts)" in printed
    assert "small: 1x4 (4 experts)" in printed
    for split in ("validation", "test"):
        assert f"trial-0 - 5555 on {split}: " in printed
        assert f"trial-0 - small on {split}: " in printed
    assert "over 2 seeds" in printed
    assert "Pareto line of experts and test loss: small (4 experts)" in printed
    assert "6 fine-tunes of 4 steps to run" in result.stderr
    assert optuna.logging.get_verbosity() >= optuna.logging.WARNING, "its remarks stay out of it"
    assert "5555, seed 11: validation " in result.stderr

    # Nothing is done twice, and no worker is started for it.
    monkeypatch.setattr(search.compare, "_open_pool", None)
    again = compare("--with", "5555", str(other), "--seeds", "2")
    assert (again.exit_code, again.stdout) == (0, result.stdout)


def test_what_failed_for_good_leaves_the_seeds_of_all_to_be_reported(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_study(tmp_path, tiny_model_dir, choices_dir)

    def script(job: FullJob) -> list[Any]:
        return [Failed("it hangs")] if (job.name, job.seed) in broken else [run_of(job)]

    monkeypatch.setattr(search.compare, "_open_pool", lambda *_: FullPool(script=script))
    given = ["--study", "mine", "--root", str(tmp_path), "--data", str(choices_dir)]
    broken = {("5555", seed) for seed in (10, 11, 12)}
    result = CliRunner().invoke(main, [*given, "--seeds", "3"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith("Error: 3 fine-tunes failed; the same command goes on\n")
    broken = {("5555", 11)}
    result = CliRunner().invoke(main, [*given, "--seeds", "3"])
    assert result.exit_code == 1
    assert "over 2 seeds" in result.stdout
    assert result.stderr.endswith("Error: 1 fine-tune failed; the same command goes on\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--study", "none"), "there is no study 'none'"),
        (("--study", "mine", "--with", "nothing"), "cannot compare with nothing: expected one of"),
        (("--study", "mine", "--trial", "7"), "trial 7 of the study 'mine' does not exist"),
        (("--study", "mine", "--seeds", "1"), "1 is not in the range 2<=x"),
    ],
)
def test_a_mistake_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, tiny_model_dir: Path, choices_dir: Path
) -> None:
    real_study(tmp_path, tiny_model_dir, choices_dir)
    result = CliRunner().invoke(main, [*words, "--root", str(tmp_path)])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
